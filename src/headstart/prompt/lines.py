"""Which lines of a text are code, and so are left as they are. Knows no rule of slimming."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")


def fenced(lines: Sequence[str]) -> list[bool]:
    """For each line whether it belongs to a fenced block, its fences included; one that is never closed ends with the
    text."""
    found = []
    fence = ""
    for line in lines:
        match = _FENCE.match(line)
        inside = bool(fence) or match is not None
        if match is not None:
            mark, rest = match.groups()
            if not fence:
                fence = mark
            elif mark[0] == fence[0] and len(mark) >= len(fence) and not rest.strip():
                fence = ""
        found.append(inside)
    return found


def is_json(text: str) -> bool:
    """Whether a text looks like one JSON value: its spaces may stand in strings."""
    bare = text.strip()
    return bare[:1] + bare[-1:] in ("{}", "[]", '""')
