"""A chat request as this package sees it: what decides the prompt, and nothing else. Reads JSON-like values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_MESSAGES = 10_000
# Message kind of a prompt that is text only.
PROMPT_ROLE = "prompt"

Message = Mapping[str, Any]


class RequestError(ValueError):
    """A value that is no chat request. The message says what is wrong with it, in one line."""


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """`parameters`: further variables of the chat template; `salt`: requests of another one share no cache."""

    messages: Sequence[Message]
    tools: Sequence[Message] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    salt: str = ""

    @property
    def last_user(self) -> int:
        """Index of the last message that asks something (`user`, or the text of a plain prompt); -1 if none does."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index].get("role") in ("user", PROMPT_ROLE):
                return index
        return -1


def parse_request(value: object) -> PromptRequest:
    """The request in `value`: OpenAI's fields, or a line of the batch API with them in its `body`.

    A `prompt` in place of `messages` must be text. Raises `RequestError`.
    """
    if not isinstance(value, dict):
        raise RequestError(f"is {_kind(value)}, not an object with messages")
    body = value.get("body", value)
    if not isinstance(body, dict):
        raise RequestError(f"has a body that is {_kind(body)}, not an object")
    salt = body.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise RequestError("has a cache_salt that is not text")
    if body.get("messages") is None and isinstance(body.get("prompt"), str):
        return PromptRequest(({"role": PROMPT_ROLE, "content": body["prompt"]},), salt=salt)
    tools = _objects(body, "tools") if body.get("tool_choice") != "none" else ()
    parameters = body.get("chat_template_kwargs") or {}
    if not isinstance(parameters, dict):
        raise RequestError("has chat_template_kwargs that are not an object")
    messages = _objects(body, "messages")
    if not messages:
        raise RequestError("has no messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"has {len(messages)} messages; at most {MAX_MESSAGES} are read")
    return PromptRequest(messages, tools, parameters, salt)


def _objects(body: Mapping[str, Any], name: str) -> tuple[Message, ...]:
    values = body.get(name) or []
    if not isinstance(values, list) or not all(isinstance(item, dict) for item in values):
        raise RequestError(f"has {name} that are not an array of objects")
    return tuple(values)


def _kind(value: object) -> str:
    names = {list: "an array", str: "text", type(None): "null", bool: "a truth value"}
    return names.get(type(value), "a number")


def content_of(message: Message) -> str:
    """A message's text as templates print it: of parts, their texts, a line each; without any, its calls as JSON."""
    content = message.get("content")
    if isinstance(content, str) and content:
        return content
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        return "\n".join(text for text in texts if isinstance(text, str))
    calls = message.get("tool_calls")
    return as_json(calls) if calls else ""


def as_json(value: object) -> str:
    """In the order of its keys: what differs only in that differs here."""
    return json.dumps(value, ensure_ascii=False, default=str)
