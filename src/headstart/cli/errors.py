"""How a command fails: exit code 1, or 2 where a flag is at fault. Knows which exceptions are a caller's mistake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from headstart.cli.failure import show_error
from headstart.config import ConfigError
from headstart.executor.base import StartupError
from headstart.hub import ModelError
from headstart.settings import FlagError


class CommandError(click.ClickException):
    """A failure that the user can act on."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        show_error(self.message)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn the exceptions that name a caller's mistake into click's; anything else keeps its traceback."""
    try:
        yield
    except FlagError as error:
        raise click.UsageError(str(error)) from error
    except (ConfigError, ModelError, StartupError) as error:
        raise CommandError(" ".join(str(error).split())) from error
