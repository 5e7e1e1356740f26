"""A step's budget of prefill work, in token equivalents, so that steps of one budget take about the same time.

A token computed at context length c costs `1 + c / horizon`: its linear layers, and attention that grows with c.
"""

from __future__ import annotations

import math


class StepBudget:
    """What is left of a step: `work` token equivalents, and `tokens` rows at most."""

    __slots__ = ("horizon", "tokens", "work")

    def __init__(self, *, work: float, tokens: int, horizon: float) -> None:
        self.work = work
        self.tokens = tokens
        self.horizon = horizon

    def chunk(self, start: int, wanted: int, align: int) -> int:
        """How many of `wanted` tokens from position `start` on fit; 0 when nothing is left.

        A chunk that does not finish the request ends on a multiple of `align` where it can, so that kernels see whole
        tiles. An unspent budget always buys at least one token, however long the context.
        """
        if self.work <= 0 or self.tokens <= 0:
            return 0
        count = max(1, min(wanted, self.tokens, self._affordable(start)))
        if count < wanted:
            aligned = (start + count) // align * align - start
            if aligned > 0:
                count = aligned
        return count

    def spend(self, start: int, count: int) -> float:
        """Take the cost of `count` tokens from position `start` on out of the budget; returns that cost."""
        cost = work_of(start, count, self.horizon)
        self.work -= cost
        self.tokens -= count
        return cost

    def _affordable(self, start: int) -> int:
        per_token = 1 + start / self.horizon
        quadratic = 1 / self.horizon
        if quadratic == 0:
            return int(self.work)
        # count * per_token + count^2 / (2 * horizon) <= work, solved without cancellation
        root = math.sqrt(per_token * per_token + 2 * quadratic * self.work)
        return int(2 * self.work / (per_token + root))


def work_of(start: int, count: int, horizon: float) -> float:
    """Cost in token equivalents of computing `count` tokens from position `start` on."""
    return count + (count * start + count * count / 2) / horizon
