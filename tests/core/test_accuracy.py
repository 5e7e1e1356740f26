"""Predictions are counted by how they turned out."""

from __future__ import annotations

import math

import pytest

from headstart.core.accuracy import RATIOS, Accuracy


def within(accuracy: Accuracy, low: float, high: float) -> int:
    return sum(accuracy.counts[RATIOS.index(low) + 1 : RATIOS.index(high) + 1])


def test_a_prediction_is_counted_by_predicted_over_real() -> None:
    accuracy = Accuracy()
    for predicted in (0.095, 0.1, 0.105, 0.112, 0.05, 9.0):
        accuracy.observe(predicted, 0.1)
    assert sum(accuracy.counts) == 6
    assert within(accuracy, 0.94, 1.06) == 3
    assert within(accuracy, 0.85, 1.15) == 4
    assert accuracy.counts[-1] == 1, "above every bound"
    assert accuracy.total == pytest.approx(0.95 + 1.0 + 1.05 + 1.12 + 0.5 + 90)


@pytest.mark.parametrize(
    ("predicted", "real"), [(0.0, 1.0), (1.0, 0.0), (1.0, -1.0), (1.0, math.nan), (1e300, 1e-300), (math.nan, 1.0)]
)
def test_what_gives_no_ratio_is_not_counted(predicted: float, real: float) -> None:
    accuracy = Accuracy()
    accuracy.observe(predicted, real)
    assert not any(accuracy.counts)
    assert accuracy.total == 0
