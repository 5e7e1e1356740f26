"""What the endpoints share: the engine, the text side and the settings of one served model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import headstart
from headstart.config import Config
from headstart.engine import AsyncEngine, EngineState
from headstart.hub.generation_config import SamplingDefaults
from headstart.metrics.collector import Collector, EngineView
from headstart.server.errors import ApiError, engine_dead, engine_starting, unknown_model
from headstart.server.explain import Explainer
from headstart.server.http import default_body_limit
from headstart.server.messages import ChatPrompts
from headstart.server.params import Limits
from headstart.server.texts import TextPool
from headstart.text import ChatTemplate, Prompt, RecentTokens, Tokenizer

# Shorter texts are tokenized on the event loop: that takes less time than the way to a thread and back.
INLINE_CHARACTERS = 400
_INLINE_TEXTS = 4
# A text longer than this (characters for each token of context) is tried by its beginning first, then by twice as much:
# what cannot fit is refused without being tokenized whole.
_PROBE_CHARACTERS = 6


@dataclass(frozen=True, slots=True)
class Services:
    """One served model. `pool` does what would hold the event loop up: long prompts, large bodies."""

    config: Config
    engine: AsyncEngine
    tokenizer: Tokenizer
    recent: RecentTokens
    prompts: ChatPrompts
    collector: Collector
    pool: TextPool
    explainer: Explainer
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return served_name(self.config)

    @property
    def max_body_bytes(self) -> int:
        given = self.config.server.max_body_bytes
        if given is not None:
            return given
        return default_body_limit(self.engine.info.max_model_len if self.engine.state is EngineState.READY else 0)

    @property
    def max_choices(self) -> int:
        """Answers that can be in the making at once; a request for more could never be served."""
        return self.config.scheduler.max_num_seqs + self.config.scheduler.max_num_waiting

    def limits(self) -> Limits:
        """Raises `ApiError` 503 while there is no engine to serve."""
        state = self.engine.state
        if state is EngineState.DEAD:
            raise engine_dead()
        if state is EngineState.STARTING:
            raise engine_starting()
        info = self.engine.info
        return self.limits_of(info.vocab_size, info.max_model_len)

    def limits_of(self, vocab_size: int, max_model_len: int) -> Limits:
        limits = Limits.of(
            self.config.server,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos=self.tokenizer.eos_token_ids,
        )
        return replace(limits, defaults=self.defaults)

    def check_model(self, name: str | None) -> None:
        """A request that names no model means the one there is. Raises `ApiError` 404."""
        if name is not None and name != self.model_name:
            raise unknown_model(name, self.model_name)

    async def tokenize(
        self, texts: Sequence[str], add_special_tokens: bool, max_model_len: int, param: str, salt: str | None = None
    ) -> list[Prompt]:
        """What is remembered under `salt` is not tokenized again; with None nothing is remembered nor looked up.

        Raises `ApiError` 400 for text that cannot fit (all of it is tokenized only if it might) or is no text."""
        if len(texts) <= _INLINE_TEXTS and sum(map(len, texts)) <= INLINE_CHARACTERS:
            return self._encode_all(texts, add_special_tokens, max_model_len, param, salt)
        return await self.pool.run(self._encode_all, texts, add_special_tokens, max_model_len, param, salt)

    def _encode_all(
        self, texts: Sequence[str], add_special_tokens: bool, max_model_len: int, param: str, salt: str | None
    ) -> list[Prompt]:
        try:
            return [self._encode(text, add_special_tokens, max_model_len, param, salt) for text in texts]
        except ValueError as error:
            raise ApiError(400, f"{param}: {error}", param=param) from None

    def _encode(self, text: str, add_special_tokens: bool, max_model_len: int, param: str, salt: str | None) -> Prompt:
        if salt is None:
            self._check_fits(text, max_model_len, param)
            return Prompt(tuple(self.tokenizer.encode(text, add_special_tokens)))
        found = self.recent.find(text, salt)
        unknown = found.unknown()
        new = text if len(unknown) == len(found.pieces) else "".join(piece.text for piece in unknown)
        self._check_fits(new, max_model_len, param, found.num_known)
        return self.recent.complete(found, add_special_tokens)

    def _check_fits(self, text: str, max_model_len: int, param: str, num_known: int = 0) -> None:
        """Raises `ApiError` 400 if the beginning of `text`, behind `num_known` tokens, is too long already."""
        most = max_model_len + max_model_len // 4 - num_known  # a cut word is no reason to refuse
        probe = max(INLINE_CHARACTERS, _PROBE_CHARACTERS * max_model_len)
        while len(text) > probe:
            if len(self.tokenizer.encode(text[:probe], False)) > most:
                raise self.too_long(f"more than {max_model_len}", param)
            probe *= 2

    def check_length(self, ids: Sequence[int], max_tokens: int, param: str) -> None:
        """Raises `ApiError` 400 unless the prompt and one more token fit the context, which the KV pool holds."""
        if not ids:
            raise ApiError(400, f"{param} has no tokens; give at least one", param=param)
        if len(ids) + min(max_tokens, 1) > self.engine.info.max_model_len:
            raise self.too_long(str(len(ids)), param)

    def too_long(self, count: str, param: str) -> ApiError:
        info = self.engine.info
        return ApiError(
            400,
            f"the prompt has {count} tokens, but the context holds {info.max_model_len} with the answer "
            f"(KV pool: {info.num_kv_tokens} tokens); shorten the {param}",
            param=param,
            code="context_length_exceeded",
        )


def served_name(config: Config) -> str:
    return config.model.served_model_name or config.model.model


def make_services(
    config: Config, engine: AsyncEngine, tokenizer: Tokenizer, template: ChatTemplate, defaults: SamplingDefaults
) -> Services:
    def view() -> EngineView:
        return EngineView(engine.state is EngineState.READY, engine.stats())

    def num_queued() -> int:
        stats = engine.stats()
        return 0 if stats is None else stats.num_waiting

    recent = RecentTokens(tokenizer, config.server.token_memory)
    collector = Collector(
        view,
        version=headstart.__version__,
        model=served_name(config),
        token_memory=lambda: recent.num_bytes,
        explain_memory=lambda: explainer.num_bytes,
    )
    pool = TextPool(config.scheduler.max_num_waiting, num_queued)
    explainer = Explainer(config, pool, collector)
    return Services(
        config=config,
        engine=engine,
        tokenizer=tokenizer,
        recent=recent,
        prompts=ChatPrompts(template),
        collector=collector,
        pool=pool,
        explainer=explainer,
        defaults=defaults,
    )
