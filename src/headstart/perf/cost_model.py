"""The cost model that learns: step time as a sum over the work in it, corrected by every step that really runs.

What is known before anything ran comes from `perf.roofline`. Two things are learned: slowly, what each kind of work
costs; quickly, how fast the machine is just now (another process may take the cores). Pure arithmetic: it knows no
clock, no file and no model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import median

from headstart.core.cost import StepWork, context_of

FEW_ROWS = 16  # up to here a row costs more: rows share the reading of weights, and kernels their tiles


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds, none negative: a step; a row; a row more of the first `FEW_ROWS`; a token of context that a row of a
    prefill, or a decode, attends to; a row that samples."""

    step: float
    row: float
    few_rows: float
    prefill_context: float
    decode_context: float
    sample: float

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{item.name} is {value}; it must be a number of seconds, 0 or more")

    def values(self) -> tuple[float, ...]:
        return (self.step, self.row, self.few_rows, self.prefill_context, self.decode_context, self.sample)


def features(work: StepWork) -> tuple[float, ...]:
    """How much of each coefficient's kind a step holds, in the order of `Coefficients.values`."""
    rows = work.num_prefill_tokens + work.num_decodes
    few = rows if rows < FEW_ROWS else FEW_ROWS
    return (1.0, rows, few, work.prefill_context, work.decode_context, work.num_samples)


class FittedCostModel:
    """Implements `CostModel`.

    Fast: the median of the last few steps' surprise moves a common factor, so one odd step moves nothing, and a machine
    that has become twice as slow is followed within some ten steps. Slow: recursive least squares on relative errors,
    with forgetting, on what each coefficient is multiplied by; an error counts as `_CLIP` at most. Coefficients stay
    within a thousand times of where they began, so whatever is observed, predictions are finite and never negative,
    and as no coefficient is negative, they never fall when the work grows.
    """

    _RECENT = 5  # steps whose median surprise is believed
    _FAST_RATE = 0.2
    _MOST_FACTOR = 1000.0
    _CLIP = 0.6
    _FORGET = 0.999

    def __init__(self, coefficients: Coefficients, *, doubt: float = 1.0) -> None:
        """As `begin`."""
        self.begin(coefficients, doubt)

    def begin(self, coefficients: Coefficients, doubt: float) -> None:
        """Believe this from now on. `doubt`: variance of what the coefficients are to be multiplied by."""
        self._doubt = doubt
        self._base = coefficients.values()
        self._multipliers = [1.0] * len(self._base)
        self._values = self._base  # base times multipliers times factor
        self._factor = 1.0
        self._recent: deque[float] = deque(maxlen=self._RECENT)
        count = len(self._base)
        self._covariance = [[doubt if i == j else 0.0 for j in range(count)] for i in range(count)]
        self.num_observed = 0

    @property
    def coefficients(self) -> Coefficients:
        """What is believed now, the machine's present speed included."""
        return Coefficients(*self._values)

    def step_seconds(self, work: StepWork) -> float:
        rows = work.num_prefill_tokens + work.num_decodes
        few = rows if rows < FEW_ROWS else FEW_ROWS
        step, row, few_rows, prefill, decode, sample = self._values
        return (
            step
            + rows * row
            + few * few_rows
            + work.prefill_context * prefill
            + work.decode_context * decode
            + work.num_samples * sample
        )

    def prefill_seconds(self, start: int, count: int) -> float:
        if count == 0:
            return 0.0
        _, row, few_rows, prefill, _, _ = self._values
        few = count if count < FEW_ROWS else FEW_ROWS
        return count * row + few * few_rows + context_of(start, count) * prefill

    def observe(self, work: StepWork, seconds: float) -> None:
        if not (math.isfinite(seconds) and seconds > 0):  # a clock that stepped
            return
        believed = self.step_seconds(work)
        if believed <= 0:
            return
        self.num_observed += 1
        surprise = math.log(seconds / believed)
        self._recent.append(surprise + math.log(self._factor))
        moved = self._FAST_RATE * (self._consensus() - math.log(self._factor))
        self._factor = min(max(self._factor * math.exp(moved), 1 / self._MOST_FACTOR), self._MOST_FACTOR)
        self._learn(work, surprise - moved, believed)
        self._settle()

    def _consensus(self) -> float:
        """What the last few steps say of the factor: the machine has changed only if all of them say the same."""
        now = math.log(self._factor)
        if min(self._recent) > now or max(self._recent) < now:
            return median(self._recent)
        return now

    def _learn(self, work: StepWork, surprise: float, believed: float) -> None:
        """One step of recursive least squares. The parts of a prediction, each over the whole, explain its error."""
        error = min(max(math.expm1(min(surprise, 1.0)), -self._CLIP), self._CLIP)
        if abs(surprise) > math.log(3):  # no step of this machine: it would teach nothing
            return
        shares = [
            base * self._factor * amount / believed for base, amount in zip(self._base, features(work), strict=True)
        ]
        gain = [sum([row[j] * shares[j] for j in range(len(shares))]) for row in self._covariance]
        spread = self._FORGET + sum([shares[i] * gain[i] for i in range(len(shares))])
        for i, value in enumerate(gain):
            moved = self._multipliers[i] + value / spread * error
            self._multipliers[i] = min(max(moved, 1 / self._MOST_FACTOR), self._MOST_FACTOR)
            row = self._covariance[i]
            for j, other in enumerate(gain):
                row[j] = (row[j] - value * other / spread) / self._FORGET
            row[i] = min(row[i], self._doubt)  # what is not seen for long is not forgotten without end

    def _settle(self) -> None:
        """A factor that lasts becomes part of the coefficients' values, not of their memory."""
        self._values = tuple(
            base * multiplier * self._factor for base, multiplier in zip(self._base, self._multipliers, strict=True)
        )


def fit(observed: Sequence[tuple[StepWork, float]]) -> Coefficients:
    """The coefficients, none negative, with the least squared relative error. Needs a step of each kind to mean much.

    By coordinate descent, which cannot but converge for so few. Raises `ValueError` without a single step.
    """
    rows = [([amount / seconds for amount in features(work)], seconds) for work, seconds in observed if seconds > 0]
    if not rows:
        raise ValueError("no step was observed")
    count = len(rows[0][0])
    gram = [[sum(x[i] * x[j] for x, _ in rows) for j in range(count)] for i in range(count)]
    target = [sum(x[i] for x, _ in rows) for i in range(count)]
    found = [0.0] * count
    for _ in range(20_000):
        most = 0.0
        for i in range(count):
            if gram[i][i] == 0:
                continue
            rest = target[i] - sum(gram[i][j] * found[j] for j in range(count)) + gram[i][i] * found[i]
            value = max(0.0, rest / gram[i][i])
            most = max(most, abs(value - found[i]) / (value or 1.0))
            found[i] = value
        if most < 1e-9:
            break
    return Coefficients(*found)


def fit_robustly(observed: Sequence[tuple[StepWork, float]], rounds: int = 3) -> Coefficients:
    """`fit`, then again without the steps that it explains worst: others took the cores meanwhile."""
    kept = list(observed)
    found = fit(kept)
    for _ in range(rounds):
        errors = sorted((abs(relative_error(found, *each)), index) for index, each in enumerate(kept))
        kept = [kept[index] for _, index in errors[: max(1, math.ceil(0.97 * len(errors)))]]
        found = fit(kept)
    return found


def relative_error(coefficients: Coefficients, work: StepWork, seconds: float) -> float:
    """Predicted over real, less 1."""
    predicted = sum(value * amount for value, amount in zip(coefficients.values(), features(work), strict=True))
    return predicted / seconds - 1


def scaled(coefficients: Coefficients, factor: float) -> Coefficients:
    return replace(
        coefficients, **{item.name: getattr(coefficients, item.name) * factor for item in fields(coefficients)}
    )
