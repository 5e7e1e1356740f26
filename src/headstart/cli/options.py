"""`headstart.settings.SETTINGS` as click options, grouped by section in the help. Knows no setting by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from headstart.config import ConfigError
from headstart.settings import SETTINGS, Setting, parse_bytes

_TITLES = {"model": "Model", "cache": "KV cache", "scheduler": "Scheduler", "server": "Server"}
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Size(click.ParamType[int]):
    """A number of bytes, written with or without a suffix."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class SettingOption(click.Option):
    """An option that belongs to a section of the configuration."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help shows its options section by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in _TITLES.values()}
        others: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                section = param.section if isinstance(param, SettingOption) else ""
                groups.get(_TITLES.get(section, ""), others).append(record)
        for title, records in [*groups.items(), ("Options", others)]:
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _type(setting: Setting) -> click.ParamType[Any] | type:
    if setting.kind == "choice":
        return click.Choice(setting.choices)
    if setting.kind == "bytes":
        return Size()
    return {"integer": int, "number": float, "switch": bool}.get(setting.kind, str)


def _default_text(setting: Setting) -> str:
    """How the default reads in the help; empty where the help text tells it itself."""
    if setting.default in (None, ()):
        return ""
    if setting.kind == "switch":
        return f"  [default: {'on' if setting.default else 'off'}]"
    if setting.kind == "bytes":
        return f"  [default: {setting.default // (1 << 20)}MiB]"
    if setting.kind == "number":
        return f"  [default: {setting.default:g}]"
    return f"  [default: {setting.default}]"


def _option(setting: Setting) -> Callable[[_Function], _Function]:
    switch = setting.kind == "switch"
    return click.option(
        f"{setting.flag}/--no-{setting.flag.removeprefix('--')}" if switch else setting.flag,
        setting.name,
        cls=SettingOption,
        section=setting.section,
        type=None if switch else _type(setting),
        default=None,
        multiple=setting.kind == "list",
        help=setting.help + _default_text(setting),
    )


def setting_options(*, without: frozenset[str] = frozenset()) -> Callable[[_Function], _Function]:
    """Decorator: every setting as an option, in order. An option that is not given arrives as None or ()."""

    def decorate(function: _Function) -> _Function:
        for setting in reversed(SETTINGS):
            if setting.name not in without:
                function = _option(setting)(function)
        return function

    return decorate


def given(values: dict[str, Any]) -> dict[str, Any]:
    """The options that the user gave."""
    return {name: value for name, value in values.items() if value not in (None, ())}
