"""Where two prompts part, and what kind of thing differed there. Pure; knows neither cache nor tokens.

Classifiers are tried from the most to the least specific; each looks at the two prompts from the first part that
differs and says a kind, or None.
"""

from __future__ import annotations

import difflib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headstart.prompt.chat import TOOL_ROLE, ChatPrompt, Part
from headstart.prompt.kinds import Kind, advice
from headstart.prompt.volatile import Value, volatile_value

_CONTEXT = 40  # characters shown on each side
_LONGEST_VALUE = 60  # characters of a name, a place, a language
_MOST_WORDS = 4  # of such a value; in a message of a user, who may well have asked another thing, it is one
_LONGEST_COMPARED = 20_000  # characters that a similarity is taken from


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where `new` left `old`. Offsets are characters of the part's text.

    `part` is the index among the new prompt's parts (its length, if it ended there). `[start, end)` is the value that
    differs, or the place where the texts part. `old` and `new`: how each goes on, to the value's end if there is one.
    """

    kind: Kind
    part: int
    role: str
    label: str
    offset: int
    start: int
    end: int
    before: str
    old: str
    new: str

    @property
    def is_tool(self) -> bool:
        return self.role == TOOL_ROLE

    @property
    def old_value(self) -> str:
        """What the value began with in the earlier prompt, as far as it is shown."""
        return self._value_before + self.old

    @property
    def new_value(self) -> str:
        return self._value_before + self.new

    @property
    def lead(self) -> str:
        """What stands before the value, in both."""
        return self.before[: len(self.before) - len(self._value_before)]

    @property
    def _value_before(self) -> str:
        """The beginning that a changed value has in common with the earlier one."""
        inside = self.offset - self.start
        return self.before[-inside:] if 0 < inside <= len(self.before) else ""

    @property
    def advice(self) -> str:
        return advice(self.kind, f"{self.label}, characters {self.start}-{self.end}")


def diverge(old: ChatPrompt, new: ChatPrompt, *, evicted: bool = False) -> Divergence:
    """How `new` differs from the earlier prompt `old`. `evicted`: the cache no longer holds what they share."""
    part, offset = parting(old, new)
    ours, theirs = _text(new.parts, part), _text(old.parts, part)
    start = end = old_end = offset
    if old.salt != new.salt:
        kind, theirs, ours = Kind.SALT, old.salt, new.salt
    elif old.template != new.template:
        kind, theirs, ours = Kind.TEMPLATE, old.template, new.template
    elif evicted:
        kind = Kind.EVICTED
    elif part == min(len(old.parts), len(new.parts)) and not _only_tools_end(old, new, part):
        kind = Kind.CONTINUED
    else:
        kind, start, end, old_end = _classify(old.parts, new.parts, part, offset)
    if kind in (Kind.SALT, Kind.TEMPLATE):
        start = end = offset = common_prefix_length(theirs, ours)
    return Divergence(
        kind=kind,
        part=part,
        role=new.parts[part].role if part < len(new.parts) else "",
        label="the request" if kind in (Kind.SALT, Kind.TEMPLATE) else _label(new.parts, part),
        offset=offset,
        start=start,
        end=end,
        before=ours[max(0, offset - _CONTEXT) : offset],
        old=_going_on(theirs, offset, old_end if start < end else len(theirs)),
        new=_going_on(ours, offset, end if start < end else len(ours)),
    )


def _going_on(text: str, start: int, end: int) -> str:
    return text[start : min(end, start + _CONTEXT)]


def parting(old: ChatPrompt, new: ChatPrompt) -> tuple[int, int]:
    """The first part that differs, and the first character in it. Prompts of other salt or template part at once."""
    if old.salt != new.salt or old.template != new.template:
        return 0, 0
    for index, (theirs, ours) in enumerate(zip(old.parts, new.parts, strict=False)):
        if theirs.role != ours.role:
            return index, 0
        if theirs.text != ours.text:
            return index, common_prefix_length(theirs.text, ours.text)
    return min(len(old.parts), len(new.parts)), 0


def common_prefix_length(a: Sequence[object], b: Sequence[object]) -> int:
    """How many first items (characters of a text) are the same, by halving: slices compare much faster."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _only_tools_end(old: ChatPrompt, new: ChatPrompt, part: int) -> bool:
    return part < max(len(old.parts), len(new.parts)) and all(p.is_tool for p in (*old.parts[:part], *new.parts[:part]))


def _text(parts: Sequence[Part], index: int) -> str:
    return parts[index].text if index < len(parts) else ""


def _label(parts: Sequence[Part], index: int) -> str:
    return parts[index].label if index < len(parts) else "the end"


def _classify(old: Sequence[Part], new: Sequence[Part], at: int, offset: int) -> Value:
    if (at < len(old) and old[at].is_tool) or (at < len(new) and new[at].is_tool):
        return _tools(old, new, at, offset)
    if kind := _moved_messages(old[at:], new[at:]):
        return Value(kind, offset, offset, offset)
    theirs, ours = old[at].text, new[at].text
    if kind := _spelling(theirs, ours, offset):
        return Value(kind, offset, offset, offset)
    if value := volatile_value(theirs, ours, offset):
        return value
    if span := _short_value(theirs, ours, offset, _most_words(new[at])):
        return Value(Kind.VALUE, *span)
    return Value(_changed_text(old, new, at), offset, len(ours), len(theirs))


def _tools(old: Sequence[Part], new: Sequence[Part], at: int, offset: int) -> Value:
    theirs = [_canonical(part.text) for part in old if part.is_tool]
    ours = [_canonical(part.text) for part in new if part.is_tool]
    if theirs == ours:
        return Value(Kind.KEYS_REORDERED, offset, offset, offset)
    if Counter(theirs) == Counter(ours):
        return Value(Kind.TOOLS_REORDERED, 0, len(_text(new, at)), len(_text(old, at)))
    if len(theirs) == len(ours):
        value = volatile_value(_text(old, at), _text(new, at), offset)
        if value and value.kind is not Kind.COUNTER and _similar(_text(old, at), _text(new, at)):
            return value
    return Value(Kind.TOOLS_CHANGED, offset, len(_text(new, at)), len(_text(old, at)))


def _moved_messages(old: Sequence[Part], new: Sequence[Part]) -> Kind | None:
    """What happened to messages as wholes: dropped, inserted, reordered, given another role."""
    theirs, ours = [_key(part) for part in old], [_key(part) for part in new]
    common = (Counter(theirs) & Counter(ours)).total()
    kept = [key for key in theirs if key in set(ours)], [key for key in ours if key in set(theirs)]
    if common >= 2 and kept[0] != kept[1] and sorted(kept[0]) == sorted(kept[1]):
        return Kind.MESSAGES_REORDERED
    if ours[0] in theirs and ours[1:2] == theirs[theirs.index(ours[0]) + 1 :][:1]:
        return Kind.HISTORY_TRUNCATED
    if theirs[0] in ours and (len(theirs) == 1 or theirs[1] in ours):
        return Kind.MESSAGE_INSERTED
    if old[0].role != new[0].role and old[0].text == new[0].text:
        return Kind.ROLE_CHANGED
    return None


def _key(part: Part) -> tuple[str, str]:
    return part.role, part.text


def _spelling(old: str, new: str, offset: int) -> Kind | None:
    """The same said otherwise: white space, Unicode form, order of JSON keys, order of passages."""
    if _same_but_end("".join(old[offset:].split()), "".join(new[offset:].split())) and old.strip() and new.strip():
        return Kind.WHITESPACE
    forms = [unicodedata.normalize("NFKC", text[max(0, offset - 1) :]) for text in (old, new)]
    if _same_but_end(*forms):
        return Kind.UNICODE
    if _keys_reordered(old, new, offset):
        return Kind.KEYS_REORDERED
    if _passages_reordered(old, new):
        return Kind.DOCUMENTS_REORDERED
    return None


def _same_but_end(old: str, new: str) -> bool:
    """Whether the texts are the same as far as the shorter one goes, at least 12 characters or all of both."""
    shared = common_prefix_length(old, new)
    return old == new or (shared == min(len(old), len(new)) and shared >= 12)


def _keys_reordered(old: str, new: str, offset: int) -> bool:
    """Whether some object that begins before the place means the same in both texts."""
    decoder = json.JSONDecoder()
    opening = [found.start() for found in re.finditer(r"\{", new[: offset + 1])]
    for start in opening[-1:-20:-1]:
        try:
            ours, our_end = decoder.raw_decode(new, start)
            theirs, their_end = decoder.raw_decode(old, start)
        except (ValueError, RecursionError):
            continue
        if ours == theirs and min(our_end, their_end) > offset:
            return True
    return False


def _passages_reordered(old: str, new: str) -> bool:
    for separator in (r"\n\s*\n", r"\n"):
        theirs, ours = (
            [piece for piece in re.split(separator, text) if len(piece.strip()) >= 12] for text in (old, new)
        )
        theirs_set, ours_set = set(theirs), set(ours)
        common = theirs_set & ours_set
        if len(common) >= 2 and len(common) * 2 >= len(ours_set):
            order = [list(dict.fromkeys(piece for piece in pieces if piece in common)) for pieces in (theirs, ours)]
            if order[0] != order[1]:
                return True
    return False


def _short_value(old: str, new: str, offset: int, most_words: int) -> tuple[int, int, int] | None:
    """`[start, end)` in `new` of a few words in the place of a few others amid the same text, and the end of those."""
    start = max(new.rfind(" ", 0, offset), new.rfind("\n", 0, offset)) + 1
    theirs, ours = old[start:], new[start:]
    for stop in re.finditer(r"(?=[\s.,;:!?)\]\"'<|]|$)", ours[: _LONGEST_VALUE + 1]):
        follow = ours[stop.start() : stop.start() + 24]
        place = theirs.find(follow, 0, _LONGEST_VALUE + len(follow)) if len(follow) >= 12 else -1
        if place > 0 and stop.start() and max(_words(theirs[:place]), _words(ours[: stop.start()])) <= most_words:
            return start, start + stop.start(), start + place
    return None


def _most_words(part: Part) -> int:
    return _MOST_WORDS if part.role in ("system", "developer") else 1


def _words(text: str) -> int:
    return len(text.split()) + _MOST_WORDS * text.count("\n")


def _changed_text(old: Sequence[Part], new: Sequence[Part], at: int) -> Kind:
    theirs, ours = old[at].text, new[at].text
    if new[at].role in ("system", "developer"):
        return Kind.SYSTEM_CHANGED
    later = {_key(part) for part in old[at + 1 :]} & {_key(part) for part in new[at + 1 :]}
    if later or (at + 1 < len(new) and _similar(theirs, ours)):
        return Kind.MESSAGE_EDITED
    shared = common_prefix_length(theirs[::-1], ours[::-1])
    return Kind.VARIABLE_FIRST if shared >= 12 or _similar(theirs, ours) else Kind.NEW_TEXT


def _similar(old: str, new: str) -> bool:
    matcher = difflib.SequenceMatcher(None, old[:_LONGEST_COMPARED].split(), new[:_LONGEST_COMPARED].split(), False)
    return matcher.quick_ratio() >= 0.6


def _canonical(text: str) -> str:
    return json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False)
