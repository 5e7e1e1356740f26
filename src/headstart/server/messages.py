"""Chat messages as clients send them: checked, brought to the plain form that chat templates expect, and rendered."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from headstart.server.errors import ApiError, bad_field
from headstart.text import ChatTemplate, TemplateError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGES = 10_000
_TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_PROBE = "headstart_probe"


class ChatPrompts:
    """A model's chat template behind the API's rules."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def render(
        self,
        messages: list[dict[str, Any]] | None,
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        extra: Mapping[str, Any],
    ) -> str:
        """The prompt's text. Raises `ApiError` 400 where the template cannot say what the caller says."""
        plain = plain_messages(messages)
        if not self._template.exists:
            raise ApiError(400, "this model has no chat template; use /v1/completions", code="no_chat_template")
        if tools and not self._takes_tools:
            raise bad_field("tools", "are not supported by this model's chat template", "unsupported_parameter")
        if not extra.keys().isdisjoint(_TEMPLATE_NAMES):
            raise bad_field("chat_template_kwargs", f"must not hold any of {', '.join(sorted(_TEMPLATE_NAMES))}")
        try:
            return self._template.render(
                plain, add_generation_prompt=add_generation_prompt, tools=tools or None, **extra
            )
        except TemplateError as error:
            raise bad_field("messages", f"do not fit: {error}", "template_error") from None

    @cached_property
    def _takes_tools(self) -> bool:
        """Whether a tool shows in the prompt: a template that does not know tools would drop them silently."""
        tool = {"type": "function", "function": {"name": _PROBE, "description": _PROBE, "parameters": {}}}
        try:
            return _PROBE in self._template.render([{"role": "user", "content": "-"}], tools=[tool])
        except TemplateError:
            return False


def plain_messages(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Messages without nulls, `developer` as `system` (templates know no other word for it), parts of text only.

    Raises `ApiError` 400 that names the message and the field, e.g. `messages[2].role`.
    """
    if messages is None:
        raise bad_field("messages", "is required")
    if not messages:
        raise bad_field("messages", "must hold at least one message")
    if len(messages) > MAX_MESSAGES:
        raise bad_field("messages", f"holds {len(messages)} messages; at most {MAX_MESSAGES} are allowed")
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role is None:
        raise bad_field(f"{where}.role", "is required")
    if not isinstance(role, str) or role not in ROLES:
        raise bad_field(f"{where}.role", f"is {str(role)[:40]!r}; it must be one of {', '.join(ROLES)}")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["role"] = "system" if role == "developer" else role
    content = message.get("content")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise bad_field(f"{where}.tool_calls", "must be an array")
    if content is None:
        if role != "assistant" or not calls:
            raise bad_field(f"{where}.content", "is required")
        plain["content"] = ""
    else:
        plain["content"] = _content(content, f"{where}.content")
    return plain


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(where, "must be a string or an array of text parts")
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, str]:
    if not isinstance(part, dict):
        raise bad_field(where, "must be an object")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise bad_field(f"{where}.type", "must be 'text': this server reads text only")
    text = part.get(kind)
    if not isinstance(text, str):
        raise bad_field(f"{where}.{kind}", "must be a string")
    return {"type": "text", "text": text}
