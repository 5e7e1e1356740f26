"""From measured steps to coefficients and errors: held out means held out, and kinds are told apart."""

from __future__ import annotations

import random

import msgspec
import pytest

from headstart.core.cost import StepWork
from headstart.perf.calibration import (
    Calibration,
    CalibrationFailure,
    CalibrationMessage,
    CalibrationProgress,
    calibrate,
    kind_of,
    prediction_errors,
)
from headstart.perf.cost_model import Coefficients, FittedCostModel, scaled
from tests.perf.test_cost_model import TRUE, some_work, taken


def measured(count: int, noise: float = 0.0) -> list[tuple[StepWork, float]]:
    rng = random.Random(1)
    works = [some_work(rng) for _ in range(count)]
    return [(work, taken(work) * rng.lognormvariate(0, noise)) for work in works]


def test_it_finds_what_steps_cost_and_says_how_well() -> None:
    found = calibrate(measured(300, noise=0.02), scaled(TRUE, 1.5))
    model = FittedCostModel(Coefficients(**found.coefficients))
    for work, _ in measured(50):
        assert model.step_seconds(work) == pytest.approx(taken(work), rel=0.05)
    assert found.num_fitted + found.errors.count == 300
    assert found.errors.count == 60
    assert 0 < found.errors.median < 0.03
    assert found.errors.median < found.errors.p90 < 0.06
    assert found.errors_before.median == pytest.approx(0.5, abs=0.03)
    assert found.errors_before.bias > 0, "predicted too long"
    assert set(found.errors_by_kind) == {"prefill", "decode", "mixed"}
    assert sum(each.count for each in found.errors_by_kind.values()) == 60


def test_steps_held_out_have_no_say_in_the_fit_that_is_tried_on_them() -> None:
    seen = measured(300)
    lied = [(work, seconds * (3 if index % 5 == 0 else 1)) for index, (work, seconds) in enumerate(seen)]
    found = calibrate(lied, TRUE)
    assert found.errors.bias == pytest.approx(1 / 3 - 1, abs=0.01)
    for step, (work, seconds) in zip(found.steps, seen, strict=True):
        assert StepWork(**step.work) == work  # type: ignore[arg-type]
        assert step.predicted_seconds == pytest.approx(seconds, rel=0.01)
        assert step.seconds == pytest.approx(seconds * (3 if step.held_out else 1))


def test_one_kind_alone_is_enough() -> None:
    decodes = [each for each in measured(300) if kind_of(each[0]) == "decode"]
    assert set(calibrate(decodes, TRUE).errors_by_kind) == {"decode"}


def test_a_handful_of_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="9 steps are too few"):
        calibrate(measured(9), TRUE)
    assert isinstance(calibrate(measured(10), TRUE), Calibration)


def test_errors_are_without_sign_but_for_the_bias() -> None:
    found = prediction_errors([-0.1, -0.3, 0.2, -0.4, 0.0])
    assert (found.count, found.median, found.bias) == (5, 0.2, -0.1)
    assert found.p90 == pytest.approx(0.36)
    alone = prediction_errors([-0.5])
    assert (alone.median, alone.p90, alone.bias) == (0.5, 0.5, -0.5)


@pytest.mark.parametrize("message", [CalibrationFailure("no"), CalibrationProgress("load", 1, None)])
def test_messages_survive_the_pipe(message: CalibrationMessage) -> None:
    assert msgspec.json.decode(msgspec.json.encode(message), type=CalibrationMessage) == message
