"""The `headstart` command. Owns the list of subcommands and how errors reach the terminal.

Subcommands are imported when they run, so that `headstart --help` is instant and never loads a model library.
"""

from headstart.cli.group import main

__all__ = ["main"]
