"""Values that differ from request to request: recognised where two texts part. Knows texts only."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

ValueKind = Literal["timestamp", "uuid", "nonce", "counter", "value"]

_REACH = 80  # characters before the difference in which a value may begin
_LONGEST_VALUE = 64  # characters of a short value (a name, a locale)
_ALIGNED = 16  # characters that must be equal behind it
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?: ?[AaPp]\.?[Mm]\b\.?)?"
_ZONE = r"(?: ?(?:Z|[A-Z]{3,4}|[+-]\d{2}:?\d{2})(?!\w))?"
_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_ORDINAL = r"\d{1,2}(?:st|nd|rd|th)?"
_DATE = (
    rf"(?:\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/]\d{{1,2}}[-/]\d{{2,4}}|\d{{1,2}}\.\d{{1,2}}\.\d{{4}}"
    rf"|{_ORDINAL} {_MONTH},?(?: \d{{4}})?|{_MONTH} {_ORDINAL}(?:,? \d{{4}})?|{_MONTH} \d{{4}})"
)
_EPOCH = r"1\d{9}(?:\d{3}|\d{6})?(?:\.\d+)?"
_COMPACT = r"20\d{6}(?:[T_-]?\d{4,6}Z?)?"
TIMESTAMP = re.compile(
    rf"(?<![\w.])(?:(?:{_DAY},? )?{_DATE}(?:(?:T|,? (?:at )?){_CLOCK}{_ZONE})?|{_DAY}(?:,? {_CLOCK}{_ZONE})?"
    rf"|{_CLOCK}{_ZONE}|{_EPOCH}|{_COMPACT})(?!\w)"
)
# Of hexadecimal digits only, with a letter and a digit among them; dashes as in RFC 9562 or none.
UUID = re.compile(
    r"(?<![0-9A-Za-z])(?:[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
    r"|(?=\d*[a-fA-F])(?=[a-fA-F]*\d)[0-9a-fA-F]{8,})(?![0-9A-Za-z])"
)
NONCE = re.compile(r"(?<![\w=-])[\w=-]{8,}(?![\w=-])", re.ASCII)
COUNTER = re.compile(r"\d+(?:[.,_]\d+)*")
_CLASSES = re.compile(r"[a-z]+|[A-Z]+|[0-9]+")
_LEAST_CHANGES = 4  # between small letters, capitals and digits inside a random token; `gpt-4-turbo` has none
_KINDS: tuple[tuple[ValueKind, re.Pattern[str]], ...] = (
    ("uuid", UUID),
    ("timestamp", TIMESTAMP),
    ("nonce", NONCE),
    ("counter", COUNTER),
)


class Value(NamedTuple):
    """A differing value: characters `[start, old_end)` of the old text, `[start, new_end)` of the new one."""

    kind: ValueKind
    start: int
    old_end: int
    new_end: int


def value_at(old: str, new: str, position: int) -> Value | None:
    """The value in which the texts differ at `position`, up to which they are equal; None if no value is at fault."""
    for kind, pattern in _KINDS:
        first, second = _covering(pattern, old, position), _covering(pattern, new, position)
        if first is None or second is None or first.start() != second.start():
            continue
        if kind == "nonce" and not (_is_random(first[0]) and _is_random(second[0])):
            continue
        return Value(kind, first.start(), first.end(), second.end())
    return _short_value(old, new, position)


def _covering(pattern: re.Pattern[str], text: str, position: int) -> re.Match[str] | None:
    """The match that holds the place, or ends at it."""
    for found in pattern.finditer(text, max(0, position - _REACH), position + _REACH):
        if found.start() > position:
            return None
        if found.end() >= position and found.end() > found.start():
            return found
    return None


def _is_random(token: str) -> bool:
    changes = sum(max(0, len(_CLASSES.findall(part)) - 1) for part in re.split(r"[_=-]", token))
    return changes >= _LEAST_CHANGES and any(map(str.isdigit, token))


def _short_value(old: str, new: str, position: int) -> Value | None:
    """Up to 64 characters of one line, after which both texts say the same again."""
    start = position
    while start > 0 and position - start < _REACH and (new[start - 1].isalnum() or new[start - 1] in "_-@."):
        start -= 1
    for length in range(_LONGEST_VALUE + 1):
        end = position + length
        behind = old[end : end + _ALIGNED]
        if not behind or "\n" in old[position:end]:
            return None
        found = new.find(behind, position, position + _LONGEST_VALUE + _ALIGNED)
        if found >= 0:
            return None if "\n" in new[position:found] else Value("value", start, end, found)
    return None
