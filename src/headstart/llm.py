"""LLM: a model in the caller's own process, without server, sockets or event loop. Text in, completions out.

A composition root of its own (it loads torch). Requests meet the same core, driver and worker as in the server.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from headstart.config import Config, ConfigError
from headstart.core.request import EngineRequest, FinishReason, SamplingParams
from headstart.core.stats import CoreStats
from headstart.core.step import RequestOutput, TokenLogprob
from headstart.engine.inprocess import InProcessEngine
from headstart.engine.ipc import EngineInfo
from headstart.hub import Progress
from headstart.launch import load_model
from headstart.replica import build_engine
from headstart.settings import SETTINGS, did_you_mean, from_value, settle
from headstart.text import Detokenizer

Prompt = str | Sequence[int]

# Settings whose only effect is on what the server offers, promises or watches over.
_OF_THE_SERVER = {setting.name for setting in SETTINGS if setting.section == "server"} | {
    *("served_model_name", "generation_config", "on_slo_miss", "priority_step_ms", "step_timeout_s"),
}
_OPTIONS = tuple(setting.name for setting in SETTINGS if setting.name not in _OF_THE_SERVER)


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """What became of one prompt. `stop`: the string or token id that ended it, if one did.

    `ledger`: where the time to the first token went, in seconds by part.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop: str | int | None
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    num_cached_tokens: int
    num_preemptions: int
    ledger: tuple[tuple[str, float], ...]
    error: str | None


class LLM(AbstractContextManager["LLM"]):
    """`LLM("smollm2-135m", threads=2).generate(["Once upon a time"], SamplingParams(max_tokens=64))`

    Args: `model` (folder, .gguf file, hub id or built-in alias; default: the built-in one), and by keyword what the
    [model], [cache] and [scheduler] sections of the configuration hold, for example `max_model_len`,
    `kv_cache_memory`, `max_num_seqs`; settings that do nothing without a server are refused. Raises `ConfigError`,
    `ModelError` or `StartupError`, each with one line. Not thread-safe. Use it as a context manager, or call `close`.
    """

    def __init__(self, model: str | None = None, *, progress: Progress | None = None, **options: Any) -> None:
        config = _settle({"model": model, **options} if model is not None else options)
        loaded = load_model(config, progress)
        self.tokenizer = loaded.tokenizer
        self.chat_template = loaded.template
        built = build_engine(config, loaded.files, loaded.spec, progress)
        self.info: EngineInfo = built.info
        self._engine = InProcessEngine(built.core, built.executor, source=built.source, on_end=built.on_end)
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        skip_special_tokens: bool = True,
    ) -> list[Completion]:
        """Complete all prompts (texts or token ids), batched and scheduled as the server would; results in order.

        `params`: one for all or one each; default: greedy, up to the context. The model's end-of-sequence ids stop a
        completion unless `ignore_eos`. Raises `RequestRefused` for a prompt that is empty or too long, `TypeError` for
        what is no list of prompts.
        """
        _check_prompts(prompts)
        requests = [
            self._request(prompt, one, ignore_eos)
            for prompt, one in zip(prompts, _spread(params, self.info, len(prompts)), strict=True)
        ]
        drafts = {
            request.request_id: _Draft(
                request, Detokenizer(self.tokenizer, request.prompt_token_ids, tuple(stop), skip_special_tokens)
            )
            for request in requests
        }
        for output in self._engine.run(requests):
            draft = drafts[output.request_id]
            if draft.feed(output):
                self._engine.abort(output.request_id)
        return [drafts[request.request_id].completion() for request in requests]

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, *, stop: Sequence[str] = ()
    ) -> Completion:
        """The assistant's next message. Raises `TemplateError` if the model's template cannot render `messages`."""
        text = self.chat_template.render(messages)
        prompt = self.tokenizer.encode(text, add_special_tokens=False)
        return self.generate([prompt], params, stop=stop)[0]

    def stats(self) -> CoreStats:
        return self._engine.stats()

    def close(self) -> None:
        self._engine.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, prompt: Prompt, params: SamplingParams, ignore_eos: bool) -> EngineRequest:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not ignore_eos:
            stop_ids = (*params.stop_token_ids, *self.tokenizer.eos_token_ids)
            params = dataclasses.replace(params, stop_token_ids=tuple(dict.fromkeys(stop_ids)))
        return EngineRequest(str(next(self._numbers)), tuple(ids), params, arrival_time=time.monotonic())


class _Draft:
    """A completion in the making."""

    def __init__(self, request: EngineRequest, detokenizer: Detokenizer) -> None:
        self._request = request
        self._detokenizer = detokenizer
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._ledger: tuple[tuple[str, float], ...] = ()
        self._last: RequestOutput | None = None

    def feed(self, output: RequestOutput) -> bool:
        """Take in news. True once, when a stop string has just ended the text and the engine does not know it yet."""
        self._ledger = self._ledger or output.ledger
        self._last = output
        if self._is_stopped():
            return False  # computed before the abort took effect
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs
        self._prompt_logprobs += output.prompt_logprobs
        self._text.append(self._detokenizer.push(output.token_ids))
        return self._is_stopped() and output.finish_reason is None

    def _is_stopped(self) -> bool:
        return self._detokenizer.stopped is not None

    def completion(self) -> Completion:
        last = self._last
        assert last is not None
        assert last.finish_reason is not None
        stopped = self._detokenizer.stopped
        return Completion(
            prompt_token_ids=self._request.prompt_token_ids,
            token_ids=tuple(self._token_ids),
            text="".join(self._text) + self._detokenizer.finish(),
            finish_reason=last.finish_reason if stopped is None else FinishReason.STOP,
            stop=last.stop_token_id if stopped is None else stopped,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            num_cached_tokens=last.num_cached_tokens,
            num_preemptions=last.num_preemptions,
            ledger=self._ledger,
            error=last.error,
        )


def _settle(options: Mapping[str, Any]) -> Config:
    for name in options:
        if name in _OF_THE_SERVER:
            raise ConfigError(f"{name} is a setting of the server and does nothing here; leave it out")
        if name not in _OPTIONS:
            raise ConfigError(f"unknown option {name}; {did_you_mean(name, _OPTIONS)}")
    given = {name: from_value(name, value) for name, value in options.items() if value is not None}
    return settle(given, env={})


def _check_prompts(prompts: object) -> None:
    """One text alone would pass for a list of one-letter prompts."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Sequence):
        raise TypeError(f"prompts must be a list of texts or of lists of token ids, not {type(prompts).__name__}")
    for index, prompt in enumerate(prompts):
        is_ids = isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt)
        if not isinstance(prompt, str) and not is_ids:
            raise TypeError(f"prompt {index} must be a text or a list of token ids, not {type(prompt).__name__}")


def _spread(
    params: SamplingParams | Sequence[SamplingParams] | None, info: EngineInfo, count: int
) -> Sequence[SamplingParams]:
    if params is None:
        params = SamplingParams(max_tokens=info.max_model_len, temperature=0.0)
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"{count} prompts but {len(params)} sampling parameters; give one for all or one each")
    return params
