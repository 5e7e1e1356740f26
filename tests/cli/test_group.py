"""The command group: help without loading a model library, near names, how errors reach the terminal."""

from __future__ import annotations

import signal
import socket
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


@pytest.mark.parametrize(
    "command",
    [
        "serve --port 70000",
        "serve --port x",
        "serve --kv-cache-memory 1",
        "serve --step-timeout-s nan",
        "serve --cors-origin example.com",
        "serve --api-key clé",
        "chat --max-tokens 0",
        "chat --temperature -1",
        "chat --temperature nan",
        "chat --url ftp://x",
        "chat --url http://x --api-key clé",
        "bench --rounds 0",
        "bench --rate nan",
        "bench --lengths 0",
        "bench --url ftp://x",
        "bench --api-key clé",
        "bench --workload idle --rate 2",
        "pull one two",
        "version --long",
        "sevre",
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(command: str) -> None:
    result = CliRunner().invoke(group, command.split())
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")


def test_without_a_command_there_is_help() -> None:
    result = CliRunner().invoke(group, [])
    assert "Commands:" in result.output
    assert "error:" not in result.output


def headstart_command(*arguments: str, before: str = "") -> list[str]:
    """A fresh interpreter that runs the program `before`, then the command."""
    root = str(Path(headstart.__file__).parents[1])
    code = f"import sys\nsys.path.insert(0, {root!r})\n{before}\nfrom headstart.cli import main\nmain()"
    return [sys.executable, "-c", code, *arguments]


@pytest.mark.parametrize("arguments", [["version"], ["--help"], ["--version"]])
def test_a_full_disk_is_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            headstart_command(*arguments), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert result.returncode == 1
    assert result.stderr == "error: cannot write: No space left on device\n"


@pytest.mark.parametrize("module", ["click", "headstart.cli.group", "headstart.cli.serve", "uvloop", "tokenizers"])
def test_ctrl_c_while_modules_are_imported(module: str) -> None:
    before = f"""
import signal
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""
    result = subprocess.run(
        headstart_command("serve", "--help", before=before), capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_while_a_command_waits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen(
            headstart_command("chat", "--url", url), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            silent.settimeout(60)
            connection, _ = silent.accept()
            with connection:
                assert connection.recv(1)  # it has asked, and waits for the answer
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.strip() == "interrupted"


def test_our_own_faults_keep_their_traceback() -> None:
    @click.command()
    def broken() -> None:
        with one_line_errors():
            raise AssertionError("a broken invariant")

    assert isinstance(CliRunner().invoke(broken).exception, AssertionError)
