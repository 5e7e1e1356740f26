"""`headstart pull`: fetch a model into the local cache and say where it is."""

from __future__ import annotations

import click

from headstart.cli.errors import one_line_errors
from headstart.cli.progress import TerminalProgress
from headstart.config import DEFAULT_MODEL
from headstart.hub import resolve


@click.command()
@click.argument("model", default=DEFAULT_MODEL)
def pull(model: str) -> None:
    """Fetch MODEL into the local cache, check it, and print where it lies.

    MODEL is a built-in alias, a hub id, a folder or a .gguf file; the default is smollm2-135m. What is cached is not
    fetched again.
    """
    with one_line_errors(), TerminalProgress() as progress:
        files = resolve(model, progress=progress)
    click.echo(f"{files.name}: {files.format} in {files.root}")
