"""The verdict that a step is stuck."""

from __future__ import annotations

import pytest

from headstart.engine.watchdog import StepStuckError, StepWatchdog


def test_a_step_that_stays_is_stuck() -> None:
    watchdog, step = StepWatchdog(limit=3.0), object()
    for now in (10.0, 11.0, 12.0, 12.9):
        watchdog.check(step, now)
    with pytest.raises(StepStuckError, match="computing for 3 s"):
        watchdog.check(step, 13.0)


def test_steps_that_come_and_go_are_not() -> None:
    watchdog = StepWatchdog(limit=1.5)
    for number in range(100):
        step = object()
        watchdog.check(step, float(number))
        watchdog.check(step, number + 0.9)
    for number in range(100, 200):
        watchdog.check(None, float(number))


def test_time_that_nobody_saw_pass_does_not_count() -> None:
    watchdog, step = StepWatchdog(limit=3.0), object()
    watchdog.check(step, 0.0)
    watchdog.check(step, 3600.0)  # this process was stopped, and the step with it
    watchdog.check(step, 3601.0)
    with pytest.raises(StepStuckError):
        watchdog.check(step, 3602.0)
