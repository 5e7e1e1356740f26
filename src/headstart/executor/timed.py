"""Steps one by one through an executor, with the clock: for calibration. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from headstart.core.cost import StepWork
from headstart.core.step import SchedulerOutput
from headstart.executor.base import Executor


def timed_steps(
    executor: Executor, steps: Iterable[tuple[SchedulerOutput, StepWork | None]], clock: Callable[[], float]
) -> Iterator[tuple[StepWork, float]]:
    """Compute `steps` in order; of those with work, the work and the seconds it took, as an engine loop would see them.

    `clock` gives monotonic seconds. Raises what a failed step raised.
    """
    for step, work in steps:
        began = clock()
        executor.submit(step).result()
        if work is not None:
            yield work, clock() - began
