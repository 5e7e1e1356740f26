"""Steps in flight, in order: what each was predicted to take, and, when it retires, what it took and for whom.

Owns the account of time: the cost model and the counts hear of each step here. Knows nothing of what comes of a step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from headstart.core.accuracy import Accuracy
from headstart.core.budget import work_of
from headstart.core.cost import CostModel, StepWork
from headstart.core.events import StepRetired
from headstart.core.request import RequestStatus
from headstart.core.schedule import Schedule, work_of_decodes
from headstart.core.stats import PREFILL_STEP_TOKENS, CoreCounters
from headstart.core.step import ScheduledChunk


@dataclass(frozen=True, slots=True)
class StepInFlight:
    step_id: int
    begin_time: float
    granted: Schedule
    work: StepWork
    predicted_seconds: float
    filling: frozenset[int]  # blocks whose content comes with it


class StepsInFlight:
    """Args: `horizon`: tokens of context whose attention costs as much as one token's other work."""

    def __init__(self, costs: CostModel, counters: CoreCounters, *, horizon: float) -> None:
        self._costs = costs
        self._counters = counters
        self._horizon = horizon
        self._steps: deque[StepInFlight] = deque()
        self._last_retirement = -math.inf
        self._prefill_steps = [0] * (len(PREFILL_STEP_TOKENS) + 1)
        self.accuracy = Accuracy()

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepInFlight]:
        """The oldest first."""
        return iter(self._steps)

    @property
    def prefill_steps(self) -> tuple[int, ...]:
        """See `CoreStats`."""
        return tuple(self._prefill_steps)

    def begin(self, granted: Schedule, now: float, filling: frozenset[int]) -> None:
        work = _work_of(granted)
        self._steps.append(StepInFlight(granted.step_id, now, granted, work, self._costs.step_seconds(work), filling))

    def seconds_left(self, now: float) -> float:
        """Until all of them are done, as predicted."""
        left = 0.0
        for index, step in enumerate(self._steps):
            left += step.predicted_seconds
            if index == 0:
                left = max(0.0, left - (now - max(step.begin_time, self._last_retirement)))
        return left

    def retire(self, sample_seconds: float, now: float) -> tuple[Schedule, StepRetired]:
        """The oldest is done: what it granted, and what is to be told of it."""
        step = self._steps.popleft()
        return step.granted, self._account(step, sample_seconds, now)

    def _account(self, step: StepInFlight, sample_seconds: float, now: float) -> StepRetired:
        shares: tuple[tuple[str, float], ...] = ()
        num_tokens = num_decodes = step.granted.num_decodes
        prefills = step.granted.chunks[num_decodes:]
        if prefills:
            shares = self._shares(step.granted, prefills)
            num_prefilled = sum(chunk.num_scheduled_tokens for chunk in prefills)
            self._counters.prompt_tokens_computed += num_prefilled
            self._prefill_steps[bisect_left(PREFILL_STEP_TOKENS, num_prefilled)] += 1
            num_tokens += num_prefilled
        self._counters.steps += 1
        # With two steps in flight a step begins when the one before it is done.
        seconds = now - max(step.begin_time, self._last_retirement)
        self._last_retirement = now
        if num_tokens:
            self._costs.observe(step.work, seconds)
            self.accuracy.observe(step.predicted_seconds, seconds)
        return StepRetired(
            step.step_id,
            step.begin_time,
            now,
            sample_seconds,
            num_tokens,
            shares,
            step.work,
            seconds,
            step.predicted_seconds,
        )

    def _shares(self, granted: Schedule, prefills: list[ScheduledChunk]) -> tuple[tuple[str, float], ...]:
        """Of those who have no token yet; they are among the prefills."""
        num_decodes = granted.num_decodes
        works = [work_of(chunk.start, chunk.num_scheduled_tokens, self._horizon) for chunk in prefills]
        # What `work_of` says of the decodes, summed at once: they are many.
        contexts = sum([chunk.start for chunk in granted.chunks[:num_decodes]])
        total = sum(works) + num_decodes + (contexts + num_decodes / 2) / self._horizon
        return tuple(
            (request.request_id, work / total)
            for request, work in zip(granted.requests[num_decodes:], works, strict=True)
            if not request.has_token and request.status is not RequestStatus.FINISHED
        )


def _work_of(granted: Schedule) -> StepWork:
    num_decodes = granted.num_decodes
    work = work_of_decodes([chunk.start for chunk in granted.chunks[:num_decodes]])
    for chunk in granted.chunks[num_decodes:]:
        work = work.with_prefill(chunk.start, chunk.num_scheduled_tokens, chunk.samples)
    return work
