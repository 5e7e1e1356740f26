"""How calls are timed: in rounds that take all cases in turn, so that a slow minute of the machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

ROUNDS = 5
SLICE_S = 0.03  # of a case in a round, or one call if that takes longer


class Timings:
    """Seconds a call of each case: one number a round, the median of its calls."""

    def __init__(self, num_cases: int) -> None:
        self._rounds: list[list[float]] = [[] for _ in range(num_cases)]

    def add(self, case: int, calls: Sequence[float]) -> None:
        self._rounds[case].append(statistics.median(calls))

    def best(self, case: int) -> float:
        """What the machine can do when nobody disturbs; not the luckiest call, which may have found its data cached."""
        return min(self._rounds[case])

    def median(self, case: int) -> float:
        return statistics.median(self._rounds[case])

    def after(self, num_cases: int) -> Timings:
        """Without the first cases."""
        rest = Timings(0)
        rest._rounds = self._rounds[num_cases:]
        return rest

    def num_rounds(self) -> int:
        return len(self._rounds[-1])


def time_in_turn(
    cases: Sequence[Callable[[], object]],
    on_done: Callable[[], None],
    *,
    budget_s: float,
    rounds: int = ROUNDS,
    slice_s: float = SLICE_S,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Time all cases, round by round; each is called once before, untimed. `on_done`: after each case of a round.

    No round begins after `budget_s`, but for the first.
    """
    timings = Timings(len(cases))
    started = clock()
    for case in cases:
        case()
    for _ in range(rounds):
        for index, case in enumerate(cases):
            calls: list[float] = []
            began = before = clock()
            while not calls or before - began < slice_s:
                case()
                after = clock()
                calls.append(after - before)
                before = after
            timings.add(index, calls)
            on_done()
        if clock() - started > budget_s:
            break
    return timings
