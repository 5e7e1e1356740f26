"""`/v1/completions`: its request (text, token ids, batches of either) and its answers."""

from __future__ import annotations

from typing import Any

import msgspec

from headstart.server import params
from headstart.server.choice import Delta
from headstart.server.errors import bad_field
from headstart.server.formats import ChunkEncoder, Head, Whole
from headstart.server.logprobs import completion_logprobs
from headstart.server.params import Generation, Limits
from headstart.server.protocol import CompletionRequest, decode
from headstart.server.sse import ChunkFrame, encode

MAX_PROMPTS = 1_024
DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionsApi:
    route = "/v1/completions"
    id_prefix = "cmpl-"
    prompt_field = "prompt"

    def parse(self, body: bytearray, limits: Limits) -> tuple[str | None, Generation]:
        fields = decode(body, CompletionRequest)
        params.refuse_unsupported(fields)
        prompts = _prompts(fields.prompt, limits.vocab_size)
        n = params.choices(fields, limits)
        if len(prompts) * n > MAX_PROMPTS:
            raise bad_field("n", f"times {len(prompts)} prompts is more than {MAX_PROMPTS} answers")
        echo = bool(fields.echo)
        default = limits.default_max_tokens or DEFAULT_MAX_TOKENS
        max_tokens = params.max_tokens("max_tokens", fields.max_tokens, default, lowest=0 if echo else 1)
        logprobs = None if fields.logprobs is None else params.num_logprobs("logprobs", fields.logprobs, limits)
        sampling = params.sampling_params(
            fields, limits, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=logprobs if echo else None
        )
        asked = params.generation(
            fields,
            limits,
            prompts=prompts,
            sampling=sampling,
            add_special_tokens=fields.add_special_tokens is not False,
            echo=echo,
        )
        return fields.model, asked

    def encoder(self, head: Head, asked: Generation) -> ChunkEncoder:
        return CompletionChunks(head, asked)

    def choice(self, whole: Whole, asked: Generation) -> dict[str, Any]:
        return {
            "index": whole.index,
            "text": whole.text,
            "logprobs": None if asked.sampling.logprobs is None else completion_logprobs(whole.entries),
            "finish_reason": whole.finish_reason,
            "stop_reason": whole.stop_reason,
        }

    def object(self) -> str:
        return "text_completion"


class CompletionChunks:
    """Encodes the chunks of one stream; see `ChatChunks`."""

    def __init__(self, head: Head, asked: Generation) -> None:
        self._frame = ChunkFrame(head.fields("text_completion"), {"usage": None} if asked.include_usage else {})
        self._with_logprobs = asked.sampling.logprobs is not None
        self._plain_end = b',"logprobs":null,"finish_reason":null}' + self._frame.closing
        self._openings = [
            self._frame.opening + b'{"index":%d,"text":' % index for index in range(asked.n * len(asked.prompts))
        ]

    def chunk(self, delta: Delta) -> bytes:
        if not self._with_logprobs and delta.finish_reason is None:
            return b"".join((self._openings[delta.index], encode(delta.text), self._plain_end))
        choice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": completion_logprobs(delta.entries) if self._with_logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return b"".join((self._frame.opening, encode(choice), self._frame.closing))

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._frame.usage(usage)


def _prompts(prompt: Any, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    """Tell the four kinds of prompt apart. Raises `ApiError` 400."""
    if prompt is None:
        raise bad_field("prompt", "is required")
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list):
        raise bad_field("prompt", "must be a string, an array of strings, of token ids, or of arrays of token ids")
    if not prompt:
        raise bad_field("prompt", "must not be empty")
    if isinstance(prompt[0], int):
        return (_ids(prompt, "prompt", vocab_size),)
    if len(prompt) > MAX_PROMPTS:
        raise bad_field("prompt", f"holds {len(prompt)} prompts; at most {MAX_PROMPTS} are allowed")
    if all(isinstance(item, str) for item in prompt):
        return tuple(prompt)
    return tuple(_ids(item, f"prompt[{at}]", vocab_size) for at, item in enumerate(prompt))


def _ids(value: Any, name: str, vocab_size: int) -> tuple[int, ...]:
    try:
        ids = msgspec.convert(value, list[int])
    except msgspec.ValidationError:
        raise bad_field(name, "must be an array of token ids (all prompts of a batch of one kind)") from None
    if not ids:
        raise bad_field(name, "must not be empty")
    return params.check_token_ids(name, ids, vocab_size)
