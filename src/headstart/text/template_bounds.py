"""How much one rendering of a chat template may compute and make. Owns the budget, and where a template spends it.

A template is a program that comes with a model and runs over callers' messages. Its loops and calls are counted, its
captured text is measured, and whatever could make much from little (a width, a repetition) is weighed before it runs.
Knows nothing of models or messages.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from jinja2 import Environment, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.filters import do_replace
from jinja2.runtime import Context, markup_join, str_join
from jinja2.visitor import NodeTransformer

MAX_TEXT = 32 * 1024 * 1024  # characters or elements that one operation, or one rendering, may make
MAX_CAPTURED = 4 * MAX_TEXT  # characters that go through a rendering's macros and captured blocks, all together
MAX_STEPS = 1_000_000  # rounds of loops and calls of one rendering
MAX_SECONDS = 5.0  # of one rendering, in CPU time of its thread

BUDGET = "budget of this rendering"  # a variable's name that no template can write
_LOOP, _CONCAT, _CAPTURE = "bounded loop", "bounded concatenation", "bounded capture"  # filters of the same kind
_CAPTURING = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)
_STEPS_BETWEEN_LOOKS = 16  # at the clock
_MAX_WIDTH = 9_999  # of formatted and padded text

_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\d{5,}|\{)")


class Budget:
    """What is left to one rendering. Every method raises `SecurityError` when that is not enough."""

    __slots__ = ("_captured", "_count_tokens", "_steps", "_until")

    def __init__(self, count_tokens: Callable[[str], int]) -> None:
        """`count_tokens`: how many control tokens a text holds."""
        self._count_tokens = count_tokens
        self._steps = 0
        self._captured = 0
        self._until: float | None = None  # short renderings never look at the clock

    def step(self) -> None:
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_LOOKS:
            return
        if self._steps > MAX_STEPS:
            raise SecurityError(f"the template takes more than {MAX_STEPS} steps")
        now = time.thread_time()
        if self._until is None:
            self._until = now + MAX_SECONDS
        if now > self._until:
            raise SecurityError(f"the template computes for more than {MAX_SECONDS:g} s")

    def capture(self, count: int) -> None:
        self._captured += count
        if self._captured > MAX_CAPTURED:
            raise SecurityError(f"the template's macros make more than {MAX_CAPTURED} characters")

    def check_replaced(self, before: str, old: str, new: str, after: str) -> None:
        """A replacement must not put control tokens together from what is left: `<|im_/thinkend|>` without `/think`."""
        count = self._count_tokens
        if (found := count(after)) and found > count(before) + before.count(old) * count(new):
            raise SecurityError("control tokens in pieces")


class Rounds:
    """The values of a loop; each costs a step."""

    __slots__ = ("_budget", "_values")

    def __init__(self, values: Any, budget: Budget) -> None:
        self._values = values
        self._budget = budget

    def __iter__(self) -> Iterator[Any]:
        step = self._budget.step
        for value in self._values:
            step()
            yield value

    def __len__(self) -> int:
        return len(self._values)


def budget_of(context: Context) -> Budget:
    budget: Budget = context.parent[BUDGET]
    return budget


def bound(template: nodes.Template, environment: Environment) -> nodes.Template:
    """Let the template's loops, concatenations and captured texts go through the budget."""
    changed: nodes.Template = _Bounding(environment).visit(template)
    return changed


class _Bounding(NodeTransformer):
    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._captures = 0  # blocks around this node whose text is not given out at once

    def visit(self, node: nodes.Node, *arguments: Any, **named: Any) -> Any:
        captures = isinstance(node, _CAPTURING)
        self._captures += captures
        self.generic_visit(node)
        self._captures -= captures
        match node:
            case nodes.For():
                node.iter = self._through(_LOOP, node.iter)
            case nodes.Concat():
                return self._through(_CONCAT, nodes.List(node.nodes, lineno=node.lineno))
            case nodes.Output() if self._captures:
                node.nodes = [self._through(_CAPTURE, inner) for inner in node.nodes]
        return node

    def _through(self, name: str, node: nodes.Node) -> nodes.Filter:
        through = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        through.set_environment(self._environment)
        return through


@pass_context
def _loop(context: Context, values: Any) -> Rounds:
    return Rounds(values, budget_of(context))


@pass_context
def _concatenation(context: Context, values: list[Any]) -> str:
    parts = [value if isinstance(value, str) else str(value) for value in values]
    _allow(sum(map(len, parts)))
    return markup_join(values) if context.eval_ctx.autoescape else str_join(parts)


@pass_context
def _capture(context: Context, value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    budget_of(context).capture(len(text))
    return text


@pass_context
def _replace(context: Context, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    _replaced(value, old, new)
    after = do_replace(context.eval_ctx, value, old, new, count)
    budget_of(context).check_replaced(str(value), str(old), str(new), after)
    return after


def bound_filters(filters: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Those of Jinja2's filters that can make much from little, weighed before they run, and the budget's own."""

    def weighed(name: str, check: Callable[..., None]) -> Callable[..., Any]:
        inner = filters[name]

        def checked(*arguments: Any, **named: Any) -> Any:
            *passed, value = arguments[: _num_passed(inner) + 1]
            rest = arguments[_num_passed(inner) + 1 :]
            if name == "join":
                value = list(value)
            check(value, *rest, **named)
            return inner(*passed, value, *rest, **named)

        for flag in vars(inner):  # how Jinja2 marks what else it passes
            setattr(checked, flag, getattr(inner, flag))
        return checked

    checks: dict[str, Callable[..., None]] = {
        "center": _padded,
        "indent": _indented,
        "format": _percent,
        "join": _joined,
    }
    checks |= {"batch": _counted, "slice": _counted, "wordwrap": _wrapped}
    own: dict[str, Callable[..., Any]] = {
        _LOOP: _loop,
        _CONCAT: _concatenation,
        _CAPTURE: _capture,
        "replace": _replace,
    }
    return own | {name: weighed(name, check) for name, check in checks.items()}


def check_method(method: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Weigh a call of a built-in method. Raises `SecurityError`."""
    owner, name = method.__self__, method.__name__
    if name == "to_bytes":
        _refuse()
    if not isinstance(owner, str | bytes):
        return
    if name in ("center", "ljust", "rjust", "zfill"):
        _padded(owner, *arguments)
    elif name == "expandtabs":
        width = arguments[0] if arguments else named.get("tabsize", 8)
        _allow(len(owner) + len(owner) * _count(width))
    elif name == "join" and arguments:
        # Of a generator the length shows only when it is used up.
        if not isinstance(arguments[0], str | list | tuple | Mapping):
            _refuse("joins what is no list")
        _joined(arguments[0], owner)
    elif name == "replace":
        _replaced(owner, *arguments, **named)


def check_format(template: str) -> None:
    """A `str.format` text. Raises `SecurityError` for a width of five digits, or one taken from the arguments."""
    if _WIDE_BRACES.search(template):
        _refuse("formats with a width that is too large")


def check_binop(operator: str, left: Any, right: Any) -> None:
    """`+`, `*`, `**` and `%`. Raises `SecurityError`."""
    if operator == "+":
        _allow(size(left) + size(right))
    elif operator == "*":
        _allow(max(_weight(left) * _count(right), _weight(right) * _count(left)))
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_WIDTH:
            _refuse("computes with a number that is too large")
    elif operator == "**" and not (_is_small(left) and _is_small(right)):
        _refuse("computes a power that is too large")
    elif operator == "%" and isinstance(left, str):
        _percent(left)


def _refuse(what: str = "makes a value that is too large") -> NoReturn:
    raise SecurityError(f"the template {what}")


def _allow(count: int) -> None:
    if count > MAX_TEXT:
        _refuse()


def _padded(value: Any, width: Any = 80, *_: Any, **__: Any) -> None:
    if _count(width) > _MAX_WIDTH:
        _refuse("formats with a width that is too large")


def _indented(value: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    text = str(value)
    each = len(width) if isinstance(width, str) else _count(width)
    _allow(len(text) + (text.count("\n") + 1) * each)


def _percent(value: Any, *_: Any, **__: Any) -> None:
    if _WIDE_PERCENT.search(str(value)):
        _refuse("formats with a width that is too large")


def _joined(values: Iterable[Any], between: Any = "", attribute: Any = None, d: Any = None) -> None:
    parts = list(values)
    separator = len(str(between if d is None else d))
    lengths = (max(map(size, part.values()), default=0) if isinstance(part, Mapping) else size(part) for part in parts)
    _allow(sum(lengths) + separator * len(parts))


def _replaced(value: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    text, sought = str(value) if not isinstance(value, bytes) else value, old
    _allow(len(text) + (text.count(sought) if sought else len(text) + 1) * size(new))


def _counted(value: Any, count: Any = 0, *_: Any, **named: Any) -> None:
    if max(map(_count, [count, *named.values()])) > MAX_STEPS:
        _refuse()


def _wrapped(value: Any, *arguments: Any, **named: Any) -> None:
    between = max(map(size, [*arguments, *named.values()]), default=0)
    _allow(len(str(value)) * (1 + between))


def size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | bytes) else 0


def _weight(value: Any) -> int:
    """Of a list, the text in it if that is more: printed, each of its repetitions counts."""
    return max(len(value), sum(map(size, value))) if isinstance(value, list | tuple) else size(value)


def _count(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def _is_small(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= 1024


def _num_passed(function: Callable[..., Any]) -> int:
    """How many arguments Jinja2 passes before a filter's value: a context or environment, or nothing."""
    return int(hasattr(function, "jinja_pass_arg"))
