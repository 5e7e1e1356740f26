"""A chat request as the parts that a template prints one after the other: tools first, then messages.

Most templates print tools before or within the system message; here they always go first. Ids of tool calls are left
out, since few templates print them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class PromptError(ValueError):
    """What was read is no chat request; the message says which field is at fault."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tool definition (`role` is "tool definition") or one message. `index` counts tools and messages apart."""

    role: str
    index: int
    text: str

    @property
    def is_tool(self) -> bool:
        return self.role == TOOL_ROLE

    @property
    def label(self) -> str:
        return f"tool {self.index}" if self.is_tool else f"message {self.index} ({self.role})"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """All that decides which cached prefix a request can use."""

    parts: tuple[Part, ...]
    model: str = ""
    salt: str = ""
    template: str = ""  # what the template is given besides tools and messages, as sorted JSON


TOOL_ROLE = "tool definition"


def read_request(body: Any) -> ChatPrompt:
    """The prompt of a chat request in OpenAI's form, or of a line of its batch API (`{"body": {...}}`).

    Raises `PromptError`.
    """
    if not isinstance(body, Mapping):
        raise PromptError("is no JSON object")
    if "messages" not in body and isinstance(body.get("body"), Mapping):
        body = body["body"]
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise PromptError("has no messages (a list of at least one)")
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise PromptError("tools: must be a list")
    parts = [Part(TOOL_ROLE, index, _json(tool)) for index, tool in enumerate(tools)]
    parts += [_message(index, message) for index, message in enumerate(messages)]
    for part in parts:
        _check_unicode(part.label, part.role, part.text)
    extra = {key: body[key] for key in ("chat_template_kwargs", "documents") if body.get(key)}
    model, salt = str(body.get("model") or ""), str(body.get("cache_salt") or "")
    template = json.dumps(extra, sort_keys=True, ensure_ascii=False) if extra else ""
    _check_unicode("a field beside them", model, salt, template)
    return ChatPrompt(tuple(parts), model, salt, template)


def _check_unicode(where: str, *texts: str) -> None:
    """JSON can say half of a surrogate pair, which no tokenizer takes and no terminal shows."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise PromptError(f"{where}: holds half of a surrogate pair (\\u{ord(half):x}), which is no text") from None


def _message(index: int, message: Any) -> Part:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(f"messages[{index}]: must be an object with a role")
    text = content_text(message.get("content"))
    if text is None:
        raise PromptError(f"messages[{index}].content: must be a string or a list of text parts")
    if calls := message.get("tool_calls"):
        functions = [call.get("function") if isinstance(call, Mapping) else call for call in _listed(calls)]
        text += ("\n" if text else "") + _json(functions)
    return Part(message["role"], index, text)


def content_text(content: Any) -> str | None:
    """The text of a message's content; other parts than text stand for themselves as JSON. None: it is no content."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        texts.append(text if isinstance(text, str) else _json(part))
    return "\n".join(texts)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
