"""Tells a caller why a prompt missed the prefix cache: what is remembered for that, who may ask, where it is said.

The comparison itself is `prompt.explain`'s. Prompts are remembered when their first token is there, whether anybody
asks or not; that takes no reading of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from headstart.config import Config
from headstart.metrics.collector import Collector
from headstart.prompt.chat import ChatPrompt, PromptError, read_request
from headstart.prompt.explain import Explanation, explain
from headstart.prompt.sent import Sent, SentPrompts
from headstart.server.errors import ApiError
from headstart.server.params import Generation
from headstart.server.promise import EXPLAIN_HEADER, Asker
from headstart.server.texts import TextPool
from headstart.text import Prompt

logger = logging.getLogger("headstart.explain")
_PROMPT_ROLE = "prompt"  # what a plain completion's text goes by


class Explainer:
    """The prompts of one server, by tenant."""

    def __init__(self, config: Config, pool: TextPool, collector: Collector) -> None:
        self._sent = SentPrompts(config.server.explain_memory if config.cache.prefix_cache else 0)
        self._always = config.server.explain
        self._remembers = bool(config.server.explain_memory)
        self._prefix_cache = config.cache.prefix_cache
        self._block_size = config.cache.block_size
        self._pool = pool
        self._collector = collector

    @property
    def num_bytes(self) -> int:
        """What remembered prompts take."""
        return self._sent.num_bytes

    def check(self, asker: Asker) -> None:
        """Raises `ApiError` 400 if it is asked for and cannot be said."""
        if asker.explain and not (self._remembers and self._prefix_cache):
            why = "remembers no prompts (explain_memory is 0)" if self._prefix_cache else "has its prefix cache off"
            name = EXPLAIN_HEADER.decode()
            raise ApiError(400, f"{name}: this server {why}; leave the header out", param=name)

    def sent(self, asked: Generation, prompts: Sequence[Prompt]) -> list[Sent]:
        """What can be remembered of a request's prompts."""
        return [Sent(prompt.ids, asked.cache_salt, _body(asked, index)) for index, prompt in enumerate(prompts)]

    async def explain(self, asked: Generation, sent: Sequence[Sent], asker: Asker) -> tuple[Explanation, ...]:
        """One for each prompt; none unless they are asked for. Raises `ApiError` 429 where too much waits."""
        if not (asker.explain or self._always):
            return ()
        candidates = self._sent.candidates(asker.tenant)
        return await self._pool.run(self._explain_all, candidates, asked.cache_salt, sent)

    def _explain_all(self, candidates: Sequence[Sent], salt: str, sent: Sequence[Sent]) -> tuple[Explanation, ...]:
        return tuple(
            explain(candidates, salt, each.ids, None if each.body is None else _read(each.body), self._block_size)
            for each in sent
        )

    def told(
        self, explanations: Sequence[Explanation], num_cached: Sequence[int], answer_id: str
    ) -> list[dict[str, object]]:
        """For the answer; also counted. With `--explain`, what broke a prefix is logged, without any text of it."""
        told = []
        for explanation, count in zip(explanations, num_cached, strict=True):
            fields = explanation.told(count, self._block_size)
            told.append(fields)
            self._collector.explained(str(fields["kind"]))
            if self._always and not fields["harmless"]:
                total, kind, where = explanation.num_tokens, fields["kind"], fields.get("where", "the prompt")
                logger.info("%s found %d of %d tokens: %s in %s", answer_id, count, total, kind, where)
        return told

    def keeper(self, sent: Sent, tenant: str, body_bytes: int, *, leads: bool) -> SentKeeper | None:
        """Of one answer to the prompt; `leads`: the first one. None where nothing is remembered."""
        return SentKeeper(self._sent, sent, tenant, body_bytes if leads else None) if self._remembers else None


class SentKeeper:
    """Implements `choice.Keeper`. `body_bytes`: None for all answers to a prompt but the first."""

    def __init__(self, memory: SentPrompts, sent: Sent, tenant: str, body_bytes: int | None) -> None:
        self._memory = memory
        self._sent = sent
        self._tenant = tenant
        self._body_bytes = body_bytes

    def begun(self) -> None:
        if self._body_bytes is not None:
            self._memory.add(self._tenant, self._sent, self._body_bytes)

    def whole(self, ids: Sequence[int], text: str) -> None:
        self._memory.answered(self._sent, tuple(ids), text)


def _body(asked: Generation, index: int) -> Mapping[str, Any] | None:
    if asked.chat is not None:
        return asked.chat
    prompt = asked.prompts[index]
    if not isinstance(prompt, str):
        return None
    return {"messages": [{"role": _PROMPT_ROLE, "content": prompt}], "cache_salt": asked.cache_salt}


def _read(body: Mapping[str, Any]) -> ChatPrompt | None:
    try:
        return read_request(body)
    except PromptError:  # text that JSON can say and no tokenizer takes
        return None
