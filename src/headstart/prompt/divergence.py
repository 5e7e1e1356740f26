"""Where a prompt leaves an earlier one, and what kind of thing differs there. Pure; knows no cache and no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from headstart.prompt.contents import are_documents_reordered, is_json_reordered, is_whitespace
from headstart.prompt.kinds import WORDS, Kind
from headstart.prompt.rendered import Prompt, common_prefix, units_of
from headstart.prompt.request import as_json
from headstart.prompt.structure import is_followed_by_the_same, messages_change, tools_change
from headstart.prompt.values import Value, value_at

CONTEXT = 48  # characters shown on either side
# In the question itself only these are at fault: names and numbers are what is asked about.
_AT_FAULT_IN_QUESTION: frozenset[Kind] = frozenset({"timestamp", "uuid", "nonce", "whitespace", "json_keys"})
_AT_FAULT_ANYWHERE = _AT_FAULT_IN_QUESTION | {"documents_reordered"}


@dataclass(frozen=True, slots=True)
class Divergence:
    """`token`, `character`: how much of the prompt equals the earlier one's. `part`: "tools", "template", "salt", or
    "message" with its index and role; `start` and `end`: the characters at fault in that message (else in the prompt).
    `before`, `old`, `new`: the text around. `shared`: characters behind that the earlier prompt has too.
    """

    kind: Kind
    part: str
    token: int
    character: int
    message: int | None = None
    role: str = ""
    start: int = 0
    end: int = 0
    before: str = ""
    old: str = ""
    new: str = ""
    shared: int = 0
    detail: str = ""

    @property
    def where(self) -> str:
        """`message 0 (system), characters 13-32`."""
        if self.message is None:
            return {"tools": "the tools", "template": "the template's text"}.get(self.part, "the request")
        name = f"message {self.message} ({self.role})"
        return f"{name}, characters {self.start}-{self.end}" if self.end > self.start else name

    @property
    def advice(self) -> str:
        return WORDS[self.kind].advice.format(where=self.where)


class _Cause(NamedTuple):
    kind: Kind
    value: Value | None = None
    detail: str = ""


def diverge(old: Prompt, new: Prompt) -> Divergence | None:
    """Where and why `new` stops being a continuation of `old`; None if it is one, or a beginning of it."""
    position = common_prefix(old.text, new.text)
    token = common_prefix(old.ids, new.ids)
    if old.request.salt != new.request.salt:
        return Divergence("salt", "salt", 0, 0, shared=position)
    if position >= min(old.end, new.end):
        return None
    index, inside = _message_of(old, new, position)
    if inside:
        return _in_message(old, new, index, token, position)
    change = tools_change(old.request.tools, new.request.tools)
    if change is not None:
        return _outside(old, new, "tools", token, position, change.kind, change.detail)
    if as_json(old.request.parameters) != as_json(new.request.parameters):
        return _outside(old, new, "template", token, position, "parameters")
    if index < max(len(old.request.messages), len(new.request.messages)):
        return _in_message(old, new, index, token, position)
    value = value_at(old.text, new.text, position)
    kind: Kind = value.kind if value is not None and value.kind != "value" else "content"
    return _outside(old, new, "template", token, position, kind, value=value)


def _message_of(old: Prompt, new: Prompt, position: int) -> tuple[int, bool]:
    """The first message from the place on that differs, and whether the place lies in its content on both sides."""
    index = min(old.message_after(position), new.message_after(position))
    for first, second in zip(old.request.messages[index:], new.request.messages[index:], strict=False):
        if as_json(first) != as_json(second):
            break
        index += 1
    return index, old.message_at(position) == new.message_at(position) == index


def _outside(
    old: Prompt,
    new: Prompt,
    part: str,
    token: int,
    position: int,
    kind: Kind,
    detail: str = "",
    value: Value | None = None,
) -> Divergence:
    if kind == "tools_changed" and value is None and detail.startswith("the definition"):
        value = value_at(old.text, new.text, position)
        kind = value.kind if value is not None and value.kind in _AT_FAULT_IN_QUESTION | {"counter"} else kind
    start, end = (value.start, value.new_end) if value is not None else (position, position)
    before, was, now = _around(old, new, start)
    shared = _shared(old, new, position)
    return Divergence(kind, part, token, position, None, "", start, end, before, was, now, shared, detail)


def _in_message(old: Prompt, new: Prompt, index: int, token: int, position: int) -> Divergence:
    messages = new.request.messages
    index = min(index, len(messages) - 1)
    role = str(messages[index].get("role", ""))
    cause = _cause(old, new, index)
    offset = common_prefix(old.content(index), new.content(index))
    start, end = (cause.value.start, cause.value.new_end) if cause.value is not None else (offset, offset)
    before, was, now = _around(old, new, position - (offset - start))
    if cause.kind in ("truncated", "messages_reordered", "edited"):
        start = end = 0
    shared = _shared(old, new, position)
    return Divergence(
        cause.kind, "message", token, position, index, role, start, end, before, was, now, shared, cause.detail
    )


def _cause(old: Prompt, new: Prompt, index: int) -> _Cause:
    before, after = old.request.messages, new.request.messages
    moved = messages_change(before, after, index)
    if moved is not None:
        return _Cause(moved.kind, None, moved.detail)
    if index >= len(before) or before[index].get("role") != after[index].get("role"):
        return _Cause("edited" if is_followed_by_the_same(before, after, index) else "content")
    cause = _inside(old.content(index), new.content(index))
    if index >= new.request.last_user:
        return cause if cause.kind in _AT_FAULT_ANYWHERE else _Cause("content", cause.value)
    if after[index].get("role") in ("system", "developer"):
        return cause if cause.kind != "content" else _Cause(_kind_of_system(old.content(index), new.content(index)))
    if is_followed_by_the_same(before, after, index):
        return cause if cause.kind not in ("content", "value") else _Cause("edited", cause.value)
    return cause if cause.kind in _AT_FAULT_ANYWHERE else _Cause("content", cause.value)


def _kind_of_system(old: str, new: str) -> Kind:
    """A system message that has little in common with the other is another application's."""
    position = common_prefix(old, new)
    return "system_changed" if 2 * _shared_text(old, new, position) >= len(new) - position else "content"


def _inside(old: str, new: str) -> _Cause:
    """What differs inside one message."""
    position = common_prefix(old, new)
    if is_json_reordered(old, new, position):
        return _Cause("json_keys")
    if is_whitespace(old, new, position):
        return _Cause("whitespace")
    if are_documents_reordered(old, new):
        return _Cause("documents_reordered")
    value = value_at(old, new, position)
    return _Cause(value.kind, value) if value is not None else _Cause("content")


def _around(old: Prompt, new: Prompt, position: int) -> tuple[str, str, str]:
    """The equal text before the place, and what each prompt says from there on."""
    start, end = max(0, position - CONTEXT), position + CONTEXT
    return new.text[start:position], old.text[position:end], new.text[position:end]


def _shared(old: Prompt, new: Prompt, position: int) -> int:
    """Characters of `new` behind the place that stand somewhere behind it in `old` too, clause by clause."""
    return _shared_text(old.text, new.text, position)


def _shared_text(old: str, new: str, position: int) -> int:
    known = set(units_of(old[position:]))
    return sum(len(unit) for unit in units_of(new[position:]) if unit in known)


def as_fields(divergence: Divergence) -> dict[str, Any]:
    """For JSON: what a reader needs, without what is empty."""
    fields: dict[str, Any] = {"kind": divergence.kind, "what": WORDS[divergence.kind].what}
    fields |= {"where": divergence.where, "token": divergence.token, "part": divergence.part}
    if divergence.message is not None:
        fields |= {"message": divergence.message, "role": divergence.role}
    if divergence.end > divergence.start:
        fields["characters"] = [divergence.start, divergence.end]
    fields |= {"before": divergence.before, "was": divergence.old, "is": divergence.new}
    if divergence.detail:
        fields["detail"] = divergence.detail
    return {**fields, "advice": divergence.advice}
