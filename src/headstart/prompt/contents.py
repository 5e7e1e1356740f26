"""What differs inside one text: whitespace, the order of JSON keys, the order of documents. Pure functions.

Each gets two texts that are equal up to `position`.
"""

from __future__ import annotations

import json
import re
from typing import Any

_LOOK = 240  # characters compared behind a difference in whitespace
_EQUAL = 32  # so many of them, whitespace left out, must be equal
_MAX_OPENINGS = 32  # braces before the difference that are tried as the beginning of a JSON value
_LABEL = r"(?:documents?|docs?|passages?|sources?|chunks?|context|results?|snippets?|examples?)"
_BORDER = re.compile(
    r"\n\s*\n|(?<=</doc>)|(?<=</document>)"
    rf"|\n(?=\s*(?:[\[(#*]*\s*{_LABEL}\b|\[\d+\]|\(?\d+[.)] |[-*•] ))|(?=<{_LABEL}\b)",
    re.IGNORECASE,
)
_HEAD = re.compile(rf"^\W*(?:{_LABEL}\b)?[\s#:_-]*(?:(?:id|index|nr|no)\W*)?\d*[\s\])>.:\"'-]*", re.IGNORECASE)
_LEAST_DOCUMENT = 24  # characters
_MIN_COMMON = 2


def is_whitespace(old: str, new: str, position: int) -> bool:
    """Whether only whitespace differs at the place, and the same text follows."""
    if not (old[position : position + 1].isspace() or new[position : position + 1].isspace()):
        return False
    bare, other = ("".join(text[position : position + _LOOK].split()) for text in (old, new))
    if min(len(bare), len(other)) < _EQUAL:
        return bare == other
    return bare[:_EQUAL] == other[:_EQUAL]


def is_json_reordered(old: str, new: str, position: int) -> bool:
    """Whether the place lies in a JSON value that is the same on both sides but for the order of keys."""
    decoder = json.JSONDecoder()
    openings = [found.start() for found in re.finditer(r"[{\[]", old[: position + 1])][-_MAX_OPENINGS:]
    for start in openings:
        try:
            first, end = decoder.raw_decode(old, start)
            second, other_end = decoder.raw_decode(new, start)
        except (ValueError, RecursionError):
            continue
        if min(end, other_end) > position and same_json(first, second) and isinstance(first, dict | list):
            return True
    return False


def same_json(first: Any, second: Any) -> bool:
    """Equal, whatever the order of keys."""
    try:
        return bool(first == second)
    except RecursionError:
        return False


def are_documents_reordered(old: str, new: str) -> bool:
    """Whether at least two passages are in both texts, in another order. Numbers before them do not count."""
    first, second = documents_of(old), documents_of(new)
    common = set(first) & set(second)
    if len(common) < _MIN_COMMON:
        return False
    return _in_order(first, common) != _in_order(second, common)


def _in_order(documents: list[str], common: set[str]) -> list[str]:
    return list(dict.fromkeys(text for text in documents if text in common))


def documents_of(text: str) -> list[str]:
    """The passages of a text: what blank lines, list marks, labels such as `Document 3:` or tags set apart."""
    parts = (_HEAD.sub("", part.strip(), count=1).strip() for part in _BORDER.split(text))
    return [part for part in parts if len(part) >= _LEAST_DOCUMENT]
