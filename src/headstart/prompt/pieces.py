"""Text as pieces that are recognised again: sentences and lines, whatever values stand in them.

Two pieces are the same if they hold the same words, in any order and regardless of numbers, ids and white space.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_END = re.compile(r"\n+|(?<=[.!?;])\s+|(?<=[。！？；])")
_WORD = re.compile(r"\b[^\W\d_]{2,}\b")
_SHORTEST = 12  # characters of a piece's words
_MONTHS = "january february march april may june july august september october november december"
_DAYS = "monday tuesday wednesday thursday friday saturday sunday"
_SHORT = "jan feb mar apr jun jul aug sep oct nov dec am pm utc gmt"
_VARIABLE = frozenset(f"{_MONTHS} {_DAYS} {_SHORT}".split(" "))


class Piece(NamedTuple):
    """`text[start:start + length]`; equal `key`: the same words."""

    key: int
    start: int
    length: int


def pieces_of(text: str) -> tuple[Piece, ...]:
    """The pieces of a text in order, without those of few words."""
    found = []
    start = 0
    for end in [*(match.end() for match in _END.finditer(text)), len(text)]:
        words = [word for word in _WORD.findall(text[start:end].lower()) if word not in _VARIABLE]
        if sum(map(len, words)) >= _SHORTEST:
            found.append(Piece(hash(tuple(sorted(words))), start, end - start))
        start = end
    return tuple(found)
