"""What is left of a step, in predicted time: so a step takes as long as it may, whatever the contexts in it."""

from __future__ import annotations

from headstart.core.cost import CostModel, StepWork

# A step that yields a first token ends with it, unless it is so short that reading the weights is most of it: up to
# this many times the shortest step, other prefills share it. Longer, and they would delay that token for little gain.
_WORTHWHILE_STEPS = 4
_SHORTEST = StepWork(num_prefill_tokens=1, num_prefills=1, prefill_context=1.0, num_samples=1)


class StepBudget:
    """Args: `work` that the step holds already, its decodes; `seconds` it may take and `tokens` of prefill, at most."""

    __slots__ = ("_costs", "seconds", "tokens", "work")

    def __init__(self, costs: CostModel, work: StepWork, *, seconds: float, tokens: int) -> None:
        self._costs = costs
        self.work = work
        self.seconds = seconds
        self.tokens = tokens

    def chunk(self, start: int, wanted: int, align: int, samples: bool) -> int:
        """How many of `wanted` tokens from position `start` on fit; 0 when nothing does.

        A chunk that does not finish the request ends on a multiple of `align` where it can, so that kernels see whole
        tiles. The first prefill of a step gets its tokens up to such a multiple however long they take: it goes on
        also where decodes alone take longer than a step may.
        """
        most = min(wanted, self.tokens)
        if most <= 0:
            return 0
        if most < wanted:
            aligned = (start + most) // align * align - start
            most = aligned if aligned > 0 else most
        if self._fits(start, most, samples and most == wanted):
            return most
        low, high = (
            start // align,
            (start + most - 1) // align,
        )  # in blocks; `low` always fits
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(start, middle * align - start, samples=False):
                low = middle
            else:
                high = middle - 1
        count = low * align - start
        if count > 0:
            return count
        return 0 if self.work.num_prefills else min(most, (start // align + 1) * align - start)

    def spend(self, start: int, count: int, samples: bool) -> None:
        """Take a chunk into the step; one that samples is the last of a step that is not short."""
        self.work = self.work.with_prefill(start, count, samples)
        self.tokens -= count
        if samples:
            worthwhile = _WORTHWHILE_STEPS * self._costs.step_seconds(_SHORTEST)
            self.seconds = min(self.seconds, worthwhile)

    def _fits(self, start: int, count: int, samples: bool) -> bool:
        return self._costs.step_seconds(self.work.with_prefill(start, count, samples)) <= self.seconds


def work_of(start: int, count: int, horizon: float) -> float:
    """Cost in token equivalents of computing `count` tokens from position `start` on: a token at context c costs
    `1 + c / horizon`. A model's shape alone gives it, so what a request is charged never depends on what was learned.
    """
    return count + (count * start + count * count / 2) / horizon
