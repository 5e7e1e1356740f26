"""How a failure looks in the terminal, whichever command it comes from: one red line on stderr."""

from __future__ import annotations

import click


def show_error(message: str) -> None:
    click.secho(f"error: {message}", fg="red", err=True)
