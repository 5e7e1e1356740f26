"""The Jinja2 environment that chat templates run in: Hugging Face's dialect, sandboxed and bounded.

Owns what a template may call; how much it may make is `template_bounds`'. Knows nothing of models or messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headstart.text.template_bounds import (
    MAX_TEXT,
    Rounds,
    bound,
    bound_filters,
    budget_of,
    check_binop,
    check_format,
    check_method,
)

MAX_ITERATIONS = 200_000  # numbers that one rendering's range() calls may give out, all together
MAX_INDENT = 64  # of JSON


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates cannot run for long or make huge values. Render with a `Budget` named `BUDGET`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return bound(super()._parse(source, name, filename), self)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if type(left) is str and type(right) is str and operator == "+" and len(left) + len(right) <= MAX_TEXT:
            return left + right  # most of what templates compute
        check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, /, *arguments: Any, **named: Any) -> Any:
        budget = budget_of(context)
        budget.step()
        if isinstance(called, BuiltinMethodType):
            check_method(called, arguments, named)
        elif isinstance(called, LoopContext) and arguments:  # the next level of a recursive loop
            arguments = (Rounds(arguments[0], budget), *arguments[1:])
        result = super().call(context, called, *arguments, **named)
        if isinstance(called, BuiltinMethodType) and called.__name__ == "replace" and isinstance(result, str):
            budget.check_replaced(str(called.__self__), arguments[0], arguments[1], result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            check_format(value.__self__)
        return wrapped


class GenerationTag(Extension):
    """`{% generation %}`: marks what the assistant wrote, for training; here it only shows its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def chat_environment() -> BoundedEnvironment:
    """An environment with the globals, filters and whitespace rules that chat templates are written for."""
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag])
    environment.filters |= bound_filters(environment.filters)
    environment.filters["tojson"] = _to_json
    del environment.globals["lipsum"]  # makes any amount of text
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
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise SecurityError("the template indents too far")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
