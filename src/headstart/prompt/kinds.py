"""The kinds of differences between a prompt and the nearest earlier one, in words: what it is, what to do."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal[
    "timestamp",
    "uuid",
    "nonce",
    "counter",
    "value",
    "whitespace",
    "json_keys",
    "documents_reordered",
    "messages_reordered",
    "tools_reordered",
    "tools_changed",
    "edited",
    "truncated",
    "system_changed",
    "parameters",
    "salt",
    "evicted",
    "content",
]


class Words(NamedTuple):
    what: str
    advice: str  # {where}: the part and characters at fault


_MOVE = "move {where} to the end of the last user message"
WORDS: dict[Kind, Words] = {
    "timestamp": Words("a date or time", f"{_MOVE}, or round it to the day"),
    "uuid": Words("a UUID or hexadecimal id", f"{_MOVE}, or out of the prompt: the model has no use for it"),
    "nonce": Words("a random token", f"{_MOVE}, or out of the prompt: the model has no use for it"),
    "counter": Words("a number that changes", _MOVE),
    "value": Words("a value of one user or call", f"{_MOVE}, behind what all requests share"),
    "whitespace": Words("whitespace only", "write the whitespace of {where} the same way each time"),
    "json_keys": Words(
        "the same JSON with its keys in another order", "write the JSON of {where} with sorted keys (sort_keys=True)"
    ),
    "documents_reordered": Words(
        "the same documents in another order", "keep the documents of {where} in one order, for example by their id"
    ),
    "messages_reordered": Words(
        "the same messages in another order", "keep the messages from {where} on in one order and append new ones"
    ),
    "tools_reordered": Words("the same tools in another order", "sort the tools by name before each request"),
    "tools_changed": Words(
        "another list of tools", "send all tools each time, or append the optional ones behind the constant ones"
    ),
    "edited": Words(
        "an earlier message edited", "leave {where} as it was sent; tell corrections in a new message at the end"
    ),
    "truncated": Words(
        "the oldest messages dropped",
        "drop old messages from {where} on rarely and many at once (to half the window), not a turn's worth each turn",
    ),
    "system_changed": Words(
        "another text in the system message", "keep {where} constant; move what changes to the last user message"
    ),
    "parameters": Words(
        "other template parameters", "send the same chat_template_kwargs each time, or in as few variants as possible"
    ),
    "salt": Words("another cache_salt", "use one cache_salt for all whose prompts may be told apart by their timing"),
    "evicted": Words(
        "nothing: it is no longer cached", "give the cache more memory, or send requests with this prefix together"
    ),
    "content": Words("other content", "nothing to do where it is the question; else move {where} towards the end"),
}
