"""One answer in the making: from the engine's outputs for one request to the text that may leave now.

Owns the choice's detokenizer, stop strings, log-probabilities and counts. Knows neither HTTP nor how chunks look.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from headstart.core.request import EngineRequest, FinishReason
from headstart.core.step import RequestOutput, TokenLogprob
from headstart.engine import AsyncEngine, RequestRefused, Reservation
from headstart.metrics.collector import REFUSED, RequestTrack
from headstart.server.errors import ApiError, shutting_down
from headstart.server.logprobs import EntryMaker, TokenEntry
from headstart.server.params import Generation
from headstart.text import Detokenizer, Open, RecentTokens, Tokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of a choice, never empty unless it is the last one. `source`: the first output that told of a token."""

    index: int
    first: bool
    text: str
    entries: tuple[TokenEntry, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    source: RequestOutput


class Keeper(Protocol):
    """Remembers an answer for what comes after it."""

    def begun(self) -> None:
        """The prompt is computed."""
        ...

    def whole(self, ids: Sequence[int], text: str) -> None:
        """It has come to its end. `ids` stay as they are."""
        ...


class AnswerMemory:
    """Gathers one answer's ids and text for those who keep them."""

    def __init__(self, keepers: Sequence[Keeper]) -> None:
        self._keepers = keepers
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._begun = False

    def add(self, token_ids: tuple[int, ...], text: str, is_last: bool) -> None:
        self._ids += token_ids
        self._texts.append(text)
        if not self._begun:
            self._begun = True
            for keeper in self._keepers:
                keeper.begun()
        if is_last:
            answer = "".join(self._texts)
            for keeper in self._keepers:
                keeper.whole(self._ids, answer)


class TokenKeeper:
    """Implements `Keeper`: the next turn of the conversation finds the ids that were sampled."""

    def __init__(self, recent: RecentTokens, end: Open) -> None:
        self._recent = recent
        self._end = end

    def begun(self) -> None:
        pass

    def whole(self, ids: Sequence[int], text: str) -> None:
        self._recent.remember(self._end, ids, text)


class Choice:
    """Feeds on the outputs of `request`. `prompt_text` is shown before the answer when the caller asked for an echo."""

    def __init__(
        self,
        index: int,
        request: EngineRequest,
        prompt_text: str,
        asked: Generation,
        tokenizer: Tokenizer,
        memory: AnswerMemory | None = None,
    ) -> None:
        self.index = index
        self.request = request
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._tokenizer = tokenizer
        self._asked = asked
        self._memory = memory
        self._detokenizer = Detokenizer(
            tokenizer, request.prompt_token_ids, asked.stop, asked.skip_special_tokens, asked.include_stop
        )
        self._echo = prompt_text if asked.echo else ""
        self._length = 0  # characters that left
        self._source: RequestOutput | None = None
        self._started = False
        self._prompt_logprobs: list[TokenLogprob] = []
        self._entries: list[TokenEntry] = []  # of tokens whose text has not left yet
        self._maker = EntryMaker(
            tokenizer,
            start=len(self._echo),
            leading_spaces=self._detokenizer.spaces_to_strip,
            skip_special_tokens=asked.skip_special_tokens,
        )

    @property
    def source(self) -> RequestOutput | None:
        """The output that brought the first token."""
        return self._source

    def feed(self, output: RequestOutput) -> Delta | None:
        """Take in one output. Raises `ApiError` if the engine gave the request up."""
        if output.finish_reason is FinishReason.ERROR:
            raise ApiError(500, output.error or "the request could not be computed", code="generation_failed")
        if output.finish_reason is FinishReason.ABORT:
            raise shutting_down()
        self._prompt_logprobs += output.prompt_logprobs
        if not output.token_ids and output.finish_reason is None:
            return None
        self._source = self._source or output
        self.num_output_tokens = output.num_output_tokens
        self.num_cached_tokens = output.num_cached_tokens
        text = self._detokenizer.push(output.token_ids)
        if self.request.params.logprobs is not None:
            self._note_entries(output)
        self._note_finish(output)
        if self.finish_reason is not None and self._detokenizer.stopped is None:
            text += self._detokenizer.finish()
        if self._memory is not None:
            self._memory.add(output.token_ids, text, self.finish_reason is not None)
        return self._delta(text)

    def _note_entries(self, output: RequestOutput) -> None:
        if self._asked.echo and not self._started and not self._entries:
            self._entries = self._echo_entries()
        num_top = self.request.params.logprobs or 0
        for token_id, logprob in zip(output.token_ids, output.logprobs, strict=False):
            self._entries.append(self._maker.token(token_id, logprob, num_top))

    def _echo_entries(self) -> list[TokenEntry]:
        maker = EntryMaker(
            self._tokenizer,
            leading_spaces=self._tokenizer.strip_leading_spaces,
            skip_special_tokens=self._asked.skip_special_tokens,
        )
        num_top = self.request.params.prompt_logprobs or 0
        logprobs = (None, *self._prompt_logprobs)
        return [
            maker.token(token_id, logprob, num_top)
            for token_id, logprob in zip(self.request.prompt_token_ids, logprobs, strict=True)
        ]

    def _note_finish(self, output: RequestOutput) -> None:
        if self._detokenizer.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", self._detokenizer.stopped
        elif output.finish_reason is not None:
            self.finish_reason = output.finish_reason.value
            if output.stop_token_id not in self._tokenizer.eos_token_ids:
                self.stop_reason = output.stop_token_id

    def _delta(self, text: str) -> Delta | None:
        if not self._started:
            text = self._echo + text
        if not text and self.finish_reason is None:
            return None
        assert self._source is not None
        self._length += len(text)
        first, self._started = not self._started, True
        return Delta(
            self.index, first, text, self._entries_that_left(), self.finish_reason, self.stop_reason, self._source
        )

    def _entries_that_left(self) -> tuple[TokenEntry, ...]:
        """Those of the tokens whose text has left wholly: the others tell what may be, or was, a stop string."""
        entries = self._entries
        if not self._asked.stop or (self.finish_reason is not None and self._detokenizer.stopped is None):
            self._entries = []
            return tuple(entries)
        self._entries = [entry for entry in entries if entry.end > self._length]
        return tuple(entry for entry in entries if entry.end <= self._length)


async def run_choice(
    engine: AsyncEngine,
    choice: Choice,
    track: RequestTrack,
    *,
    reservation: Reservation | None = None,
    after: asyncio.Event | None = None,
    begun: asyncio.Event | None = None,
) -> AsyncGenerator[Delta, None]:
    """Generate one choice. Leaving early, for whatever reason, aborts it in the engine.

    Waits for `after` first (the choice whose prompt it will find in the prefix cache); sets `begun` at its first token.
    """
    reason = FinishReason.ABORT.value
    try:
        if after is not None:
            await after.wait()
        if not choice.request.submit_time:
            choice.request = replace(choice.request, submit_time=time.monotonic())
        async with aclosing(engine.generate(choice.request, reservation)) as outputs:
            async for output in outputs:
                track.observe(output)
                delta = choice.feed(output)
                if begun is not None and output.token_ids:
                    begun.set()
                if delta is not None:
                    yield delta
                if choice.finish_reason is not None:
                    reason = choice.finish_reason
                    return
    except RequestRefused:
        reason = REFUSED
        raise
    except Exception:  # anything else that is thrown in here is the caller leaving
        reason = FinishReason.ERROR.value
        raise
    finally:
        if begun is not None:
            begun.set()
        track.close(reason)
