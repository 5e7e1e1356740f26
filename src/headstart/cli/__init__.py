"""The `headstart` command. Owns the list of subcommands and how errors reach the terminal.

Subcommands are imported when they run, so that `headstart --help` is instant and never loads a model library.
"""

from __future__ import annotations

from importlib import import_module
from typing import NoReturn

from headstart.cli.interrupts import plain_interrupts


def main() -> NoReturn:
    """Entry point of the `headstart` script."""
    with plain_interrupts():
        group = import_module("headstart.cli.group").group
    group(prog_name="headstart")
    raise AssertionError("click exits by itself")


__all__ = ["main"]
