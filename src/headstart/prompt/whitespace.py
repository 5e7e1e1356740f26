"""The rule `whitespace`: spaces at the ends of lines, runs of spaces inside them, runs of blank lines.

Left as they are: fenced code, indented lines, tables, quoted text, JSON. Works on one text at a time, so that what was
said before stays the same whatever is said later.
"""

from __future__ import annotations

import re

from headstart.prompt.lines import fenced, is_json

_INNER = re.compile(r'("[^"]*"|`[^`]*`)|(?<=\S) {2,}(?=\S)')
_COLUMNS = re.compile(r"[^\s.!?:;,] {2,}\S")  # two spaces behind a full stop are no column


def trim(text: str, *, whole: bool) -> str:
    """The text without whitespace that says nothing. `whole`: it begins and ends the message, so may its blank lines
    go there, too."""
    if is_json(text):
        return text
    lines = text.split("\n")
    code = fenced(lines)
    indented = [_is_indented(line) for line in lines]
    columns = [_has_columns(line) for line in lines]
    kept: list[str] = []
    for at, line in enumerate(lines):
        if code[at] or indented[at]:
            kept.append(line)
        elif line.strip():
            table = columns[at] and any(columns[max(at - 1, 0) : at] + columns[at + 1 : at + 2])
            kept.append(_trim_line(line, table))
        elif not _is_surplus(at, lines, code, indented):
            kept.append("")
    trimmed = "\n".join(kept)
    return _without_blank_ends(trimmed, code[0], code[-1]) if whole else trimmed


def _is_surplus(at: int, lines: list[str], code: list[bool], indented: list[bool]) -> bool:
    """Whether a blank line follows another one. Such lines are kept in the midst of indented ones."""
    if at == 0 or code[at - 1] or lines[at - 1].strip():
        return False
    return True


def _is_indented(line: str) -> bool:
    return line.startswith(("    ", "\t")) and not line.isspace()


def _has_columns(line: str) -> bool:
    return "|" in line or "\t" in line.strip() or _COLUMNS.search(line) is not None


def _trim_line(line: str, table: bool) -> str:
    line = line.rstrip()
    if table or "|" in line or "\t" in line or line.count('"') % 2 or line.count("`") % 2:
        return line
    return _INNER.sub(lambda match: match.group(1) or " ", line)


def _without_blank_ends(text: str, code_first: bool, code_last: bool) -> str:
    if not code_first:
        text = re.sub(r"\A\n+", "", text)
    return text if code_last else text.rstrip("\n")
