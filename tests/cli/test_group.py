"""The command group: help without loading a model library, near names, how errors reach the terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import headstart
from headstart.cli.errors import one_line_errors
from headstart.cli.group import COMMANDS, group
from headstart.config import ConfigError
from headstart.executor.base import StartupError
from headstart.hub import ModelError


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(group, ["--help"])
    assert result.exit_code == 0
    assert [name for name in COMMANDS if f"\n  {name} " in result.output] == list(COMMANDS)


def test_help_loads_no_subcommand() -> None:
    code = "import sys; from headstart.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    root = str(Path(headstart.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r}); {code}", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(result.stderr.split())
    assert "headstart.cli.group" in loaded
    assert not loaded & {"torch", "rich", "headstart.hub", "headstart.cli.serve", "headstart.bench", "headstart.server"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_in_the_group_is_the_commands_own(name: str) -> None:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    assert command.name == name
    assert command.help is not None


def test_a_mistyped_command_gets_the_nearest_one() -> None:
    result = CliRunner().invoke(group, ["sevre"])
    assert result.exit_code == 2
    assert "no command 'sevre'; did you mean serve?" in result.stderr


def test_version() -> None:
    result = CliRunner().invoke(group, ["version"])
    assert result.exit_code == 0
    assert result.output.startswith(f"headstart {headstart.__version__}\n")
    assert "\ntorch " in result.output


def test_python_m_headstart() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "headstart", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == f"headstart {headstart.__version__}\n"


@pytest.mark.parametrize("kind", [ConfigError, ModelError, StartupError])
def test_a_callers_mistake_is_one_red_line_and_exit_code_1(kind: type[Exception]) -> None:
    @click.command()
    def broken() -> None:
        with one_line_errors():
            raise kind("the file is damaged:\n  fetch it again")

    result = CliRunner().invoke(broken, color=True)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "\x1b[31merror: the file is damaged: fetch it again\x1b[0m\n"


def test_our_own_faults_keep_their_traceback() -> None:
    @click.command()
    def broken() -> None:
        with one_line_errors():
            raise AssertionError("a broken invariant")

    assert isinstance(CliRunner().invoke(broken).exception, AssertionError)
