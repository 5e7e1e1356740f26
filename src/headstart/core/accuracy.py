"""How predictions of step times turn out, counted: predicted over real, by buckets."""

from __future__ import annotations

import math
from bisect import bisect_left

# Upper bounds of a predicted over a real time; a last bucket without bound follows. Errors of 3, 6 and 15 % are exact.
RATIOS = (
    *(0.1, 0.25, 0.5, 0.67, 0.8, 0.85, 0.9, 0.94, 0.97),
    *(1.0, 1.03, 1.06, 1.1, 1.15, 1.25, 1.5, 2.0, 4.0, 10.0),
)


class Accuracy:
    """Counts predictions by how they turned out."""

    def __init__(self) -> None:
        self._counts = [0] * (len(RATIOS) + 1)
        self.total = 0.0  # sum of the ratios

    @property
    def counts(self) -> tuple[int, ...]:
        """One for each of `RATIOS`, and what is above them all."""
        return tuple(self._counts)

    def observe(self, predicted: float, real: float) -> None:
        """Seconds both. A clock that stepped, or a model that says nothing, leaves no ratio to count."""
        if predicted > 0 and real > 0 and math.isfinite(ratio := predicted / real):
            self._counts[bisect_left(RATIOS, ratio)] += 1
            self.total += ratio
