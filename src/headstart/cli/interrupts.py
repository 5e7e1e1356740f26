"""Ctrl-C while Python imports: what it does then. Standard library only, since it is there before anything else."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

INTERRUPTED = 130  # what a shell says of a command that SIGINT ended


@contextlib.contextmanager
def plain_interrupts() -> Iterator[None]:
    """SIGINT ends the process at once and without a word, as it does with programs that do not handle it.

    Raised in the middle of an import, `KeyboardInterrupt` would print a trace, or get lost in a callback.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored (nohup), or somebody else's matter
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
