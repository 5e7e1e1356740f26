"""The rule `boilerplate`: lines of web pages that say nothing about what the page is about.

Only whole lines, only outside code, and only in what was retrieved: tool results and documents, never what a user or
the system says. The list is short on purpose; a line that says anything else stays.
"""

from __future__ import annotations

import re

from headstart.prompt.lines import fenced, is_json

LINES = (
    r"skip to (?:the )?(?:main )?(?:content|navigation|search)",
    r"(?:back|return|jump) to (?:the )?top",
    r"(?:toggle|open|close|main|site) (?:navigation|menu)",
    r"(?:accept|reject|allow|decline) (?:all )?cookies",
    r"(?:manage|change) (?:my |your )?cookie(?:s| settings| preferences)",
    r"(?:this (?:web)?site|we) uses? cookies[^.]{0,200}\.?(?: (?:learn|read) more\.?)?",
    r"(?:share|follow us) on (?:facebook|twitter|x|linkedin|reddit|whatsapp|instagram)",
    r"(?:sign up for|subscribe to) our newsletter",
    r"(?:©|\(c\)|copyright)[^.]{0,100}\.? ?all rights reserved",
    r"all rights reserved",
    r"\[?edit(?: this page)?(?:\]|(?: on github)?)",
    r"(?:privacy policy|terms of (?:service|use)|cookie policy)"
    r"(?: ?[|·•/,] ?(?:privacy policy|terms of (?:service|use)|cookie policy))*",
)
_MARKS = r"[\s*#>\-•|]*"
_LINE = re.compile(rf"{_MARKS}(?:{'|'.join(LINES)})[\s.!»›↑^*|]*", re.IGNORECASE)
_LINK = re.compile(r"!?\[([^\]]{0,200})\]\([^()\s]{0,500}\)")
_LONGEST = 400  # characters of a line that can be boilerplate


def strip_boilerplate(text: str) -> str:
    """The text without comments of HTML that fill lines, and without lines of the list, linked or not."""
    if is_json(text):
        return text
    lines = text.split("\n")
    code = fenced(lines)
    closers = _comment_ends(lines)
    kept: list[str] = []
    at = 0
    while at < len(lines):
        end = closers[at]
        if end is not None and not any(code[at : end + 1]):
            at = end + 1
            continue
        if code[at] or not _says_nothing(lines[at]):
            kept.append(lines[at])
        at += 1
    return "\n".join(kept)


def _says_nothing(line: str) -> bool:
    if len(line) > _LONGEST or not line.strip():
        return False
    return _LINE.fullmatch(_LINK.sub(r"\1", line)) is not None


def _comment_ends(lines: list[str]) -> list[int | None]:
    """For each line that begins a comment the line that ends with it; None if anything stands beside the comment."""
    ends: list[int | None] = [None] * len(lines)
    following: int | None = None  # the next line that closes a comment
    for at in range(len(lines) - 1, -1, -1):
        line = lines[at].strip()
        opens = line.startswith("<!--")
        if "-->" in line[4:] if opens else "-->" in line:
            following = at
        if opens and following is not None:
            closing = lines[following].strip()
            if closing.index("-->", 4 if following == at else 0) == len(closing) - 3:
                ends[at] = following
    return ends
