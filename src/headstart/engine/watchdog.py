"""StepWatchdog: how long the oldest step has been in flight. Owns the verdict that a step is stuck; knows no steps.

A loop that answers pings says nothing about the thread that computes: a kernel that never returns would leave its
clients waiting for ever.
"""

from __future__ import annotations

from collections.abc import Hashable

TICK_SECONDS = 1.0


class StepStuckError(RuntimeError):
    """A step has been computing for too long."""


class StepWatchdog:
    """Asked at least each `TICK_SECONDS` while a step is in flight.

    It adds up what it saw pass, at most one tick each time: a process that was stopped for an hour has not computed.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._step: Hashable | None = None
        self._age = 0.0
        self._last = 0.0

    def check(self, oldest: Hashable | None, now: float) -> None:
        """`oldest`: whatever identifies the oldest step in flight, None without one. Raises `StepStuckError`."""
        if oldest is not self._step:
            self._step, self._age = oldest, 0.0
        elif oldest is not None:
            self._age += min(now - self._last, TICK_SECONDS)
            if self._age >= self._limit:
                raise StepStuckError(
                    f"a step has been computing for {self._age:.0f} s; restart the server, or raise step_timeout_s "
                    "if steps of this model may take as long"
                )
        self._last = now
