"""Values that change from request to request, recognised by how they are written: dates, ids, counters, nonces."""

from __future__ import annotations

import re
from typing import NamedTuple

from headstart.prompt.kinds import Kind

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[ap]\.?m\.?)?"
_ZONE = r"(?:\s?(?:z|utc|gmt|[+-]\d{2}:?\d{2}))?"
_DATES = (
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}",
    r"\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}",
    rf"{_MONTH}\s\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s\d{{4}})?",
    rf"\d{{1,2}}\.?\s{_MONTH}(?:\s\d{{4}})?",
)
_DATE = f"(?:{'|'.join(_DATES)})"
_TIME = rf"(?:{_DAY},?\s)?{_DATE}(?:(?:t|,?\s(?:at\s)?){_CLOCK}{_ZONE})?\b|\b{_CLOCK}{_ZONE}\b|\b{_DAY}"

# In order: the first that covers the place where two texts part, in both of them, names the kind.
_PATTERNS = (
    (Kind.UUID, r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"),
    (Kind.TIMESTAMP, rf"\b(?:{_TIME})\b"),
    (Kind.TIMESTAMP, r"\b1[5-9]\d{8}(?:\d{3}|\.\d+)?\b"),  # seconds or milliseconds since 1970, from 2017 to 2033
    (Kind.HEX_ID, r"\b(?:0x)?(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b"),
    (Kind.VERSION, r"\bv(?:ersion)?\.?\s?\d+(?:\.\d+)*\b|\b\d+\.\d+\.\d+\b"),
    (Kind.NONCE, r"(?<![\w+/=-])(?=[\w+/-]*\d)(?=[\w+/-]*[a-z])[\w+/-]{8,}={0,2}(?![\w+/=-])"),
    (Kind.COUNTER, r"(?<![\w.])[-#]?\d[\d,]*(?:\.\d+)?(?!\w)"),
)
_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _PATTERNS)
_REACH = 80  # characters; no such value is longer


class Value(NamedTuple):
    """`new[start:end]`, in whose place stands `old[start:old_end]`."""

    kind: Kind
    start: int
    end: int
    old_end: int


def volatile_value(old: str, new: str, offset: int) -> Value | None:
    """The value of `new` that `offset` lies in, where `old` has another of the same kind from the same character on."""
    for kind, pattern in _COMPILED:
        ours, theirs = _covering(pattern, new, offset), _covering(pattern, old, offset)
        if ours and theirs and ours[0] == theirs[0]:
            return Value(kind, *ours, theirs[1])
    return None


def _covering(pattern: re.Pattern[str], text: str, offset: int) -> tuple[int, int] | None:
    start = max(0, offset - _REACH)
    for found in pattern.finditer(text, start, offset + _REACH):
        if found.start() <= offset <= found.end() and found.start() < len(text):
            return found.span()
    return None
