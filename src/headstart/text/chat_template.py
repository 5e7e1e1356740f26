"""Messages to the prompt text that a model was trained on, by its own Jinja2 template.

Owns where a model's template lies, and the few repairs that make OpenAI-shaped messages fit templates: parts of content
are joined where the template wants a string, arguments of tool calls are objects. Knows nothing of HTTP or token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from headstart.hub import GGUFFile, ModelError, ModelFiles, gguf_reader, read_json
from headstart.text.control_tokens import ControlTokens, Protection
from headstart.text.sandbox import bounded_range, chat_environment
from headstart.text.template_bounds import BUDGET, MAX_TEXT, Budget
from headstart.text.tokenizer import Tokenizer, special_token_texts

_PROBE = "\u0001probe\u0001"  # content that shows whether a template prints it, and as what
_TOOL_USE = "tool_use"  # the name of the template that some models use when tools are given
_DEFAULT = "default"


class TemplateError(ValueError):
    """Messages that a chat template refuses, or a model without one: the caller's mistake, told in one line."""


class ChatTemplate:
    """A model's chat templates. Rendering is pure and safe to call from several threads."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        control_tokens: Iterable[str] = (),
        name: str = "the model",
    ) -> None:
        """`sources`: templates by name (`default`, perhaps `tool_use`); empty for a model that has none.

        `special_tokens` are variables of the template; `control_tokens` are what messages can hold as text only.
        Raises `ModelError` naming `name` for a template that does not compile.
        """
        self._name = name
        self._special_tokens = dict(special_tokens)
        self._control_tokens = ControlTokens(control_tokens)
        self._source = "".join(sources.values())
        environment = chat_environment()
        self._templates: dict[str, jinja2.Template] = {}
        for key, source in sources.items():
            try:
                self._templates[key] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise ModelError(f"{name}: chat template {key!r} is damaged, line {error.lineno}: {error}") from None
            except RecursionError:
                raise ModelError(f"{name}: chat template {key!r} is nested too deeply") from None

    @classmethod
    def load(cls, files: ModelFiles, tokenizer: Tokenizer) -> ChatTemplate:
        """The templates of a model. Raises `ModelError` for damaged files."""
        special = special_token_texts(files, tokenizer)
        return cls(_sources(files), special, control_tokens=tokenizer.control_tokens, name=files.name)

    @property
    def exists(self) -> bool:
        """Whether the model can chat at all."""
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The prompt. Special tokens are in it as text: encode it with `add_special_tokens=False`.

        Control tokens that the arguments hold are no control tokens: then this is a `PromptText`, which `Tokenizer`
        knows to encode. `extra` are further variables of the template (`enable_thinking`, ...); they cannot replace
        those above. Raises `TemplateError`.
        """
        template = self._choose(tools)
        plain = [_plain_message(index, message) for index, message in enumerate(messages)]
        if any(isinstance(message.get("content"), list) for message in plain):
            if not self._takes_parts:
                plain = [_joined(message) for message in plain]
        elif self._takes_only_parts:
            plain = [_split(message) for message in plain]
        given = {**extra, "messages": plain, "tools": tools, "documents": documents}
        given, protection = self._protected(given)
        variables = {**self._special_tokens, **given, "add_generation_prompt": add_generation_prompt}
        if protection is None:
            return self._run(template, variables)
        try:
            return protection.settle(self._run(template, variables))
        except TemplateError as error:
            raise TemplateError(protection.restore(str(error))) from error

    def _protected(self, given: dict[str, Any]) -> tuple[dict[str, Any], Protection | None]:
        try:
            return self._control_tokens.protect(given, self._source)
        except RecursionError:
            raise TemplateError("the messages are nested too deeply") from None
        except ValueError as error:
            raise TemplateError(str(error)) from None

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        if not self._templates:
            raise TemplateError(f"{self._name} has no chat template: use /v1/completions, or start with one given")
        if tools and _TOOL_USE in self._templates:
            return self._templates[_TOOL_USE]
        return self._templates.get(_DEFAULT) or next(iter(self._templates.values()))

    def _run(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        pieces, size = [], 0
        try:
            for piece in template.generate(
                {**variables, "range": bounded_range(), BUDGET: Budget(self._control_tokens.count)}
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_TEXT:
                    raise SecurityError(f"the prompt is longer than {MAX_TEXT} characters")
        except Exception as error:  # a template can raise anything: it is a program over the caller's data
            detail = " ".join(str(error).split()) or type(error).__name__
            raise TemplateError(f"the chat template of {self._name} refuses these messages: {detail}") from error
        return "".join(pieces)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether a list of text parts comes out as its text, and not as Python's or JSON's spelling of a list."""
        return self._shows([{"type": "text", "text": _PROBE}])

    @cached_property
    def _takes_only_parts(self) -> bool:
        return self._takes_parts and not self._shows(_PROBE)

    def _shows(self, content: Any) -> bool:
        message = {"role": "user", "content": content}
        variables = {**self._special_tokens, "messages": [message], "tools": None, "documents": None}
        try:
            text = self._run(self._choose(None), {**variables, "add_generation_prompt": True})
        except TemplateError:
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with checked content parts, no null content, and tool arguments as objects, as templates expect them."""
    plain = dict(message)
    content = plain.get("content")
    if content is None:
        plain["content"] = ""
    elif isinstance(content, list):
        plain["content"] = [
            _text_part(f"messages[{index}].content[{place}]", part) for place, part in enumerate(content)
        ]
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _text_part(where: str, part: Any) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise TemplateError(f"{where} is of type {kind!r}: this server takes text parts only")
    return {"type": "text", "text": part["text"]}


def _plain_call(call: Any) -> Any:
    """OpenAI sends a call's arguments as JSON text; templates print them as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _split(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _sources(files: ModelFiles) -> dict[str, str]:
    """Templates by name. A chat_template.jinja goes before tokenizer_config.json, as in transformers."""
    sources: dict[str, str] = {}
    if files.format == "gguf":
        sources = _sources_of_gguf(gguf_reader(files.weights[0]))
    if files.tokenizer_config is not None:
        sources |= _named(read_json(files.tokenizer_config).get("chat_template"))
    if files.chat_template is not None:
        try:
            sources[_DEFAULT] = files.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {files.chat_template}: {error}") from None
    return sources


def _named(value: Any) -> dict[str, str]:
    """tokenizer_config.json's `chat_template`: one text, or a list of `{name, template}`."""
    if isinstance(value, str):
        return {_DEFAULT: value}
    if not isinstance(value, list):
        return {}
    return {
        item["name"]: item["template"]
        for item in value
        if isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
    }


def _sources_of_gguf(file: GGUFFile) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    sources = {
        key.removeprefix(prefix + "."): value
        for key, value in file.metadata.items()
        if key.startswith(prefix + ".") and isinstance(value, str)
    }
    default = file.get(prefix, str)
    return sources if default is None else {_DEFAULT: default, **sources}
