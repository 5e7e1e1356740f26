"""How two lists of messages or tools differ: dropped, reordered, edited, added. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headstart.prompt.contents import same_json
from headstart.prompt.kinds import Kind
from headstart.prompt.request import Message, as_json


class Change(NamedTuple):
    kind: Kind
    detail: str


def messages_change(old: Sequence[Message], new: Sequence[Message], index: int) -> Change | None:
    """What happened to the messages from `index` on, where the lists part; None if only this one message differs."""
    before, after = list(map(as_json, old[index:])), list(map(as_json, new[index:]))
    return _dropped(before, after) or _reordered(before, after)


def _dropped(before: list[str], after: list[str]) -> Change | None:
    """The old messages go on later than where they did: `after`, perhaps with a summary first, is their end."""
    for summary in (0, 1):
        rest = after[summary:]
        for count in range(1 + summary, len(before)):
            kept = before[count:]
            if rest[: len(kept)] == kept:
                detail = "dropped" if not summary else "replaced by one"
                return Change("truncated", f"{count} {_messages(count)} {detail}")
    return None


def _reordered(before: list[str], after: list[str]) -> Change | None:
    if before and after and before[0] != after[0] and before[0] in after and after[0] in before:
        return Change("messages_reordered", "")
    return None


def _messages(count: int) -> str:
    return "message" if count == 1 else "messages"


def is_followed_by_the_same(old: Sequence[Message], new: Sequence[Message], index: int) -> bool:
    """Whether the message at `index` was edited, put in or taken out, and the next ones are as they were."""
    before, after = list(map(as_json, old[index : index + 3])), list(map(as_json, new[index : index + 3]))
    if len(after) < 2 or not before:
        return False
    return after[1] in before or (len(before) > 1 and after[0] == before[1])


def tools_change(old: Sequence[Message], new: Sequence[Message]) -> Change | None:
    """What differs between two lists of tools; None if they are equal to the letter."""
    first, second = list(map(as_json, old)), list(map(as_json, new))
    if first == second:
        return None
    if same_json(list(old), list(new)):
        return Change("json_keys", "keys of the tools")
    names, others = list(map(tool_name, old)), list(map(tool_name, new))
    if sorted(names) != sorted(others):
        added = [name for name in others if name not in names]
        removed = [name for name in names if name not in others]
        parts = [f"{word} {', '.join(found[:4])}" for word, found in (("added", added), ("removed", removed)) if found]
        return Change("tools_changed", "; ".join(parts))
    if names != others:
        return Change("tools_reordered", f"{others[0]} first, {names[0]} before" if others[0] != names[0] else "")
    changed = next(name for name, a, b in zip(names, first, second, strict=True) if a != b)
    return Change("tools_changed", f"the definition of {changed}")


def tool_name(tool: Message) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return name if isinstance(name, str) else "a tool without a name"
