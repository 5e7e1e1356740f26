"""A rendered prompt: its text, its token ids, and where in the text each message lies."""

from __future__ import annotations

import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from headstart.prompt.request import Message, PromptRequest, content_of

_UNIT = re.compile(r"\n+|(?<=[.!?;:,>}\]]) +|(?<=>)(?=\S)")
_LEAST_UNIT = 12  # characters; shorter ones are shared by chance
_FIRST_STEP = 256
_SKETCHED = 16_384  # characters
_Sequence = TypeVar("_Sequence", str, "array[int]")


class Span(NamedTuple):
    """Characters `[start, end)` of a prompt."""

    start: int
    end: int


@dataclass(frozen=True)
class Prompt:
    """One prompt. `spans`: where the content of each message stands in `text`; `ids`: its tokens, 32 bits each."""

    request: PromptRequest
    text: str
    ids: array[int]
    spans: tuple[Span, ...]

    @cached_property
    def units(self) -> frozenset[int]:
        """Hashes of the clauses in the beginning of the text: two prompts of one template share most of theirs."""
        return frozenset(map(hash, units_of(self.text[:_SKETCHED])))

    @cached_property
    def num_bytes(self) -> int:
        """About what holding it takes: messages and text are held apart."""
        size = sys.getsizeof(self.text)
        return 2 * size + 4 * min(size, _SKETCHED) + self.ids.itemsize * len(self.ids) + 512 * (len(self.spans) + 1)

    @property
    def end(self) -> int:
        """The character at which the last message ends; behind it the template only asks for the answer."""
        return self.spans[-1].end if self.spans else len(self.text)

    def content(self, index: int) -> str:
        """A message's content as it stands in the prompt; as the request has it where the template made it another.

        Empty for a message that there is not.
        """
        if index >= len(self.spans):
            return ""
        start, end = self.spans[index]
        return self.text[start:end] or content_of(self.request.messages[index])

    def message_at(self, position: int) -> int | None:
        """The message in whose content the character lies, its end included; None for the template's own text."""
        index = bisect_right(self.spans, position, key=lambda span: span.start) - 1
        if index >= 0 and self.spans[index].start <= position <= self.spans[index].end:
            return index
        return None

    def message_after(self, position: int) -> int:
        """The first message whose content does not end before the character; the number of messages if all do."""
        return bisect_right(self.spans, position - 1, key=lambda span: span.end)


def token_ids(ids: Sequence[int]) -> array[int]:
    """Ids as they are kept: 4 bytes each."""
    return array("I", ids)


def locate(messages: Sequence[Message], text: str) -> tuple[Span, ...]:
    """Where each message's content stands in the prompt `text`, in order.

    Templates print contents as they are, or without the whitespace around them. What a template makes something else of
    gets the empty span at which the message before it ends.
    """
    spans: list[Span] = []
    position = 0
    for message in messages:
        content = content_of(message)
        start = text.find(content, position) if content else -1
        if start < 0 and content:
            content = content.strip()
            start = text.find(content, position) if content else -1
        if start < 0:
            spans.append(Span(position, position))
            continue
        position = start + len(content)
        spans.append(Span(start, position))
    return tuple(spans)


def common_prefix(first: _Sequence, second: _Sequence) -> int:
    """How many leading items are equal. Compares slices: as fast as memory for long ones."""
    end = min(len(first), len(second))
    low, step = 0, _FIRST_STEP
    while low < end:
        high = min(end, low + step)
        if first[low:high] != second[low:high]:
            return low + _first_difference(first[low:high], second[low:high])
        low, step = high, step * 2
    return end


def _first_difference(first: Any, second: Any) -> int:
    low, high = 0, len(first)  # the first `low` are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def units_of(text: str) -> list[str]:
    """The clauses of a text: lines, and what ends with punctuation, without those too short to tell anything."""
    return [unit for unit in _UNIT.split(text) if len(unit) >= _LEAST_UNIT]
