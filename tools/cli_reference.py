"""Writes docs/reference/cli.md from the commands themselves: `python tools/cli_reference.py`.

A test compares the page with what this renders, so that the reference is always complete.
"""

from __future__ import annotations

from pathlib import Path

import click

from headstart.cli.group import COMMANDS, group
from headstart.settings import SETTINGS, Setting

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "cli.md"
_INTRODUCTION = """# Command line

<!-- Written by tools/cli_reference.py: change the commands, then run `make reference`. -->

`headstart COMMAND [OPTIONS]`, or `python -m headstart`. Exit codes: 0 done; 1 the command failed, with one line on
stderr that says why; 2 the command line is wrong.
"""
_SECTIONS = {"model": "Model", "cache": "KV cache", "scheduler": "Scheduler", "server": "Server"}


def _default(setting: Setting) -> str:
    if setting.default in (None, ()):
        return ""
    if setting.kind == "switch":
        return "on" if setting.default else "off"
    if setting.kind == "bytes":
        return f"`{setting.default // (1 << 20)}MiB`"
    return f"`{setting.default:g}`" if setting.kind == "number" else f"`{setting.default}`"


def _setting_row(setting: Setting) -> str:
    flag = f"{setting.flag}` / `--no-{setting.flag.removeprefix('--')}" if setting.kind == "switch" else setting.flag
    flag = "MODEL" if setting.name == "model" else flag
    text, _, default = setting.help.partition(" [default: ")
    choices = f" One of {', '.join(f'`{choice}`' for choice in setting.choices)}." if setting.choices else ""
    return f"| `{flag}` | {text}{choices} | {default.removesuffix(']') or _default(setting)} | `{setting.env}` |"


def _settings() -> list[str]:
    lines = [
        "| flag | |\n|---|---|",
        "| `--config FILE` | TOML file with the settings below; environment: `HEADSTART_CONFIG` |\n",
        "Settings come from flags, the environment and the file: see [Configuration](../guides/configuration.md).",
    ]
    for section, title in _SECTIONS.items():
        lines += [f"\n### {title} · `[{section}]`\n", "| flag | | default | environment |", "|---|---|---|---|"]
        lines += [_setting_row(setting) for setting in SETTINGS if setting.section == section]
    return [*lines, ""]


def _parameters(command: click.Command) -> list[str]:
    context = click.Context(command, info_name=command.name)
    records = [param.get_help_record(context) for param in command.params if isinstance(param, click.Option)]
    rows = [f"| `{_cell(flags)}` | {_cell(text)} |" for flags, text in filter(None, records)]
    return ["| flag | |", "|---|---|", *rows, ""] if rows else []


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _command(name: str) -> list[str]:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    context = click.Context(command, parent=click.Context(group, info_name="headstart"), info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"## {name}\n", f"```\n{context.command_path} {usage}\n```\n", _paragraphs(command.help or ""), ""]
    return [*lines, *(_settings() if name == "serve" else _parameters(command))]


def _paragraphs(text: str) -> str:
    lines = [line.strip() for line in text.replace("\b", "").strip().splitlines()]
    return "\n".join(lines)


def render() -> str:
    """The whole page."""
    lines = [_INTRODUCTION]
    for name in COMMANDS:
        lines += _command(name)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
