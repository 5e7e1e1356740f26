"""`headstart version`: what to put into a bug report. Reads package metadata only, imports none of the packages."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

import click

import headstart

_PACKAGES = ("torch", "tokenizers", "starlette", "uvicorn", "pyzmq", "msgspec")


@click.command()
def version() -> None:
    """Print the versions of headstart and what it runs on."""
    click.echo(f"headstart {headstart.__version__}")
    click.echo(f"python {platform.python_version()} on {platform.system().lower()} {platform.machine()}")
    for package in _PACKAGES:
        try:
            click.echo(f"{package} {installed(package)}")
        except PackageNotFoundError:
            click.echo(f"{package} not installed")
