"""The command group: lazy subcommands, near names for mistyped ones, and the end of a command that fails.

Knows no subcommand's options.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import click
from click.exceptions import NoArgsIsHelpError

import headstart
from headstart.cli.failure import show_error
from headstart.cli.interrupts import INTERRUPTED, plain_interrupts
from headstart.settings import did_you_mean


class Lazy(NamedTuple):
    """A subcommand that is imported when it is first needed; `summary` is its line in the group's help."""

    target: str  # "module:attribute"
    summary: str


COMMANDS = {
    "serve": Lazy("headstart.cli.serve:serve", "Serve a model over the OpenAI-compatible HTTP API."),
    "chat": Lazy("headstart.cli.chat:chat", "Chat with a model in the terminal."),
    "bench": Lazy("headstart.bench.command:bench", "Measure TTFT, TPOT and goodput of a running server."),
    "calibrate": Lazy("headstart.cli.calibrate:calibrate", "Measure what steps cost here, for better predictions."),
    "lint": Lazy("headstart.cli.lint:lint", "Find what breaks the prefix cache in a log of requests."),
    "pull": Lazy("headstart.cli.pull:pull", "Fetch a model into the local cache."),
    "version": Lazy("headstart.cli.version:version", "Print the versions of headstart and what it runs on."),
}


class LazyGroup(click.Group):
    """A group that knows its subcommands by name only, until one of them runs. All of them fail in one style."""

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except click.ClickException as error:
            show_error(" ".join(error.format_message().split()))
            code = error.exit_code
        except click.Abort:
            click.echo("interrupted", err=True)
            code = INTERRUPTED
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            _drop_output()
            show_error(f"cannot write: {error.strerror}")
            code = 1
        sys.exit(code)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].target.partition(":")
        with plain_interrupts():
            command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            ctx.fail(f"no command {args[0]!r}; {did_you_mean(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in COMMANDS.items()])


def _drop_output() -> None:
    """Python would try once more to write what is left, and print a trace."""
    with contextlib.suppress(OSError):  # not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(headstart.__version__, "-V", "--version", message="headstart %(version)s")
def group() -> None:
    """Headstart: an LLM inference server built for the time to first token."""
