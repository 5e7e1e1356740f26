"""From measured steps to coefficients, and how well they predict steps that they were not fitted to. Measures nothing.

Also the words in which the measuring process talks to `headstart calibrate`: one JSON message a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median, quantiles
from typing import Literal

import msgspec

from headstart.core.cost import StepWork
from headstart.perf.cost_model import Coefficients, fit_robustly, relative_error

SCHEMA: Literal["headstart.calibration/1"] = "headstart.calibration/1"
HELD_OUT_EVERY = 5
_KINDS = ("prefill", "decode", "mixed")

Observed = Sequence[tuple[StepWork, float]]


class PredictionErrors(msgspec.Struct, kw_only=True):
    """Of predicted over real, less 1, without its sign: half and nine tenths of `count` steps are at most so far off.

    `bias`: the median with its sign; above 0: predicted too long.
    """

    count: int
    median: float
    p90: float
    bias: float


class MeasuredStep(msgspec.Struct, kw_only=True):
    """`work`: the numbers of a `StepWork` by name. Seconds; predicted by what was fitted to the steps not held out."""

    work: dict[str, float]
    seconds: float
    predicted_seconds: float
    held_out: bool


class Calibration(msgspec.Struct, kw_only=True):
    """`coefficients`: seconds, fitted to all steps. Errors are those of a fit to the others on the steps held out.

    `errors_before`: of what was believed at first, learned (`was_known`) or guessed from the model's shape.
    """

    coefficients: dict[str, float]
    num_fitted: int
    errors: PredictionErrors
    errors_by_kind: dict[str, PredictionErrors]
    errors_before: PredictionErrors
    steps: list[MeasuredStep]


class CalibrationReport(msgspec.Struct, kw_only=True, tag="report"):
    """`file`: where the coefficients are kept. `seconds`: what the sweep took."""

    version: str
    started_at: str
    model: str
    summary: str
    threads: int
    load: float
    seconds: float
    was_known: bool
    file: str
    calibration: Calibration
    schema: str = SCHEMA


class CalibrationFailure(msgspec.Struct, tag="failure"):
    """One line for people."""

    message: str


class CalibrationProgress(msgspec.Struct, tag="progress"):
    """As of `headstart.hub.Progress`."""

    stage: str
    done: int
    total: int | None


CalibrationMessage = CalibrationReport | CalibrationFailure | CalibrationProgress


def calibrate(observed: Observed, believed: Coefficients) -> Calibration:
    """Fit, and try the fit on every fifth step. `believed`: what was thought before. Raises `ValueError` for under 10
    steps."""
    if len(observed) < 2 * HELD_OUT_EVERY:
        raise ValueError(f"{len(observed)} steps are too few")
    held_out = observed[::HELD_OUT_EVERY]
    fitted = fit_robustly([each for index, each in enumerate(observed) if index % HELD_OUT_EVERY])
    by_kind = {kind: [each for each in held_out if kind_of(each[0]) == kind] for kind in _KINDS}
    return Calibration(
        coefficients=asdict(fit_robustly(observed)),
        num_fitted=len(observed) - len(held_out),
        errors=errors_of(fitted, held_out),
        errors_by_kind={kind: errors_of(fitted, some) for kind, some in by_kind.items() if some},
        errors_before=errors_of(believed, held_out),
        steps=[
            MeasuredStep(
                work=work._asdict(),
                seconds=seconds,
                predicted_seconds=(1 + relative_error(fitted, work, seconds)) * seconds,
                held_out=index % HELD_OUT_EVERY == 0,
            )
            for index, (work, seconds) in enumerate(observed)
        ],
    )


def kind_of(work: StepWork) -> str:
    """Of `prefill`, `decode` and `mixed`: what a step computes."""
    if not work.num_prefills:
        return "decode"
    return "mixed" if work.num_decodes else "prefill"


def errors_of(coefficients: Coefficients, observed: Observed) -> PredictionErrors:
    return prediction_errors([relative_error(coefficients, work, seconds) for work, seconds in observed])


def prediction_errors(errors: Sequence[float]) -> PredictionErrors:
    """Args: `errors`: predicted over real, less 1, of at least one step."""
    sizes = [abs(error) for error in errors]
    p90 = quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
    return PredictionErrors(count=len(sizes), median=median(sizes), p90=p90, bias=median(errors))
