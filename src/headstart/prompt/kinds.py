"""The kinds of things that make prompts part, and what to do about each."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """What differed where two prompts part."""

    SALT = "cache salt"
    TEMPLATE = "template parameter"
    TOOLS_REORDERED = "reordered tools"
    TOOLS_CHANGED = "changed tools"
    KEYS_REORDERED = "reordered JSON keys"
    HISTORY_TRUNCATED = "truncated history"
    MESSAGE_INSERTED = "inserted message"
    MESSAGES_REORDERED = "reordered messages"
    ROLE_CHANGED = "changed role"
    WHITESPACE = "whitespace"
    UNICODE = "Unicode form"
    DOCUMENTS_REORDERED = "reordered passages"
    UUID = "UUID"
    TIMESTAMP = "timestamp"
    HEX_ID = "hex id"
    VERSION = "version"
    COUNTER = "counter"
    NONCE = "random string"
    VALUE = "user or locale value"
    SYSTEM_CHANGED = "changed system prompt"
    MESSAGE_EDITED = "edited earlier message"
    VARIABLE_FIRST = "variable text before shared text"
    NEW_TEXT = "new text"  # the normal end of a shared prefix: another question
    CONTINUED = "continued"  # one is the beginning of the other: nothing differs
    EVICTED = "evicted"  # it was the same, but is no longer cached
    RENDERED_OTHERWISE = "rendered otherwise"  # the same messages, but other tokens
    FIRST = "first"  # nothing to compare with is remembered


# None of them breaks a prefix.
HARMLESS = frozenset({Kind.NEW_TEXT, Kind.CONTINUED, Kind.FIRST})

_ADVICE = {
    Kind.SALT: "use one cache_salt for all who may share a cache, not one a request",
    Kind.TEMPLATE: "send the same chat_template_kwargs and documents each time; what varies goes into the last message",
    Kind.TOOLS_REORDERED: "send the tools in one fixed order, for example sorted by name",
    Kind.TOOLS_CHANGED: "send the same tools each time, and say in the last message which may be used",
    Kind.KEYS_REORDERED: "serialize JSON with sorted keys",
    Kind.HISTORY_TRUNCATED: "drop history seldom and much at once (to half, when full) instead of a little each turn",
    Kind.MESSAGE_INSERTED: "append what is new after the messages that were sent before",
    Kind.MESSAGES_REORDERED: "keep messages in the order in which they were first sent",
    Kind.ROLE_CHANGED: "keep the role that the message was first sent with",
    Kind.WHITESPACE: "send the very same text again: trim and format it once, when it is first made",
    Kind.UNICODE: "normalize text to NFC once, when it is first made",
    Kind.DOCUMENTS_REORDERED: "keep passages in a fixed order (by id, not by score), or after the shared text",
    Kind.VERSION: "change versions of a prompt for all requests at once, or put the version last",
    Kind.SYSTEM_CHANGED: "keep one system prompt; put what varies into the last user message",
    Kind.MESSAGE_EDITED: "leave earlier messages as they were sent; append the correction as a new message",
    Kind.VARIABLE_FIRST: "put the part that is always the same before the part that varies",
    Kind.EVICTED: "give the KV cache more memory (--kv-cache-memory), or send the next turn sooner",
    Kind.RENDERED_OTHERWISE: "send the answer back as it came; if it was, give --token-memory more, "
    "or the chat template prints earlier answers in another way",
}


def advice(kind: Kind, where: str) -> str:
    """What to do; `where` names the value, such as "message 0 (system), characters 13-32"."""
    if kind in _ADVICE:
        return _ADVICE[kind]
    if kind in HARMLESS:
        return ""
    return f"move the {kind} in {where} to the end of the last user message, or leave it out"
