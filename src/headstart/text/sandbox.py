"""The Jinja2 environment that chat templates run in: Hugging Face's dialect, sandboxed and bounded.

Owns what a template may call and how much it may make. Knows nothing of models or messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_ITERATIONS = 200_000  # numbers that one rendering's range() calls may give out, all together
MAX_TEXT = 32 * 1024 * 1024  # characters or elements that one operation, or one rendering, may make

_WIDE_FORMAT = re.compile(
    r"%[^a-zA-Z%]*(\d{4,}|\*)"
)  # a width of four digits and more, or one taken from the arguments


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which `+`, `*`, `**` and `%` cannot make huge values."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and _size(left) + _size(right) > MAX_TEXT:
            raise SecurityError("the template makes a value that is too large")
        if operator == "*" and max(_size(left) * _count(right), _size(right) * _count(left)) > MAX_TEXT:
            raise SecurityError("the template makes a value that is too large")
        if operator == "**" and not (_is_small(left) and _is_small(right)):
            raise SecurityError("the template computes a power that is too large")
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError("the template formats with a width that is too large")
        return super().call_binop(context, operator, left, right)


class GenerationTag(Extension):
    """`{% generation %}`: marks what the assistant wrote, for training; here it only shows its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def chat_environment() -> BoundedEnvironment:
    """An environment with the globals, filters and whitespace rules that chat templates are written for."""
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def bounded_range() -> Callable[..., range]:
    """A `range` for one rendering, with a common budget for all its calls, so that nested loops end."""
    left = MAX_ITERATIONS

    def limited(*arguments: int) -> range:
        nonlocal left
        numbers = range(*arguments)
        left -= len(numbers)
        if left < 0:
            raise SecurityError(f"the template loops over more than {MAX_ITERATIONS} numbers")
        return numbers

    return limited


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes: Jinja2's own `tojson` would turn `<` into \\u003c."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | bytes) else 0


def _count(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def _is_small(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= 1024
