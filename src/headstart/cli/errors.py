"""How a command fails: one clear red line on stderr and exit code 1. Knows which exceptions are a caller's mistake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from headstart.config import ConfigError
from headstart.executor.base import StartupError
from headstart.hub import ModelError


class CommandError(click.ClickException):
    """A failure that the user can act on."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        click.secho(f"error: {self.message}", fg="red", err=True)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn the exceptions that name a caller's mistake into a `CommandError`; anything else keeps its traceback."""
    try:
        yield
    except (ConfigError, ModelError, StartupError) as error:
        raise CommandError(" ".join(str(error).split())) from error
