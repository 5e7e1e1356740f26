"""Numbers against values that were worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.bench.record import RequestRecord
from headstart.bench.stats import SLO, Quantiles, median_figures, over_rounds, percentile, summarise


def record(**fields: Any) -> RequestRecord:
    settled = {"target": "server", "round": 0, "group": "g", "index": 0, "status": "ok", "sent_s": 0.0, "end_s": 1.0}
    return RequestRecord(**(settled | fields))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(float(np.percentile(values, share * 100)), rel=1e-9, abs=1e-6)


def test_a_summary_of_a_mixed_group() -> None:
    summary = summarise(
        [
            record(
                sent_s=1.0,
                end_s=3.0,
                ttft_ms=100,
                tpot_ms=10,
                prompt_tokens=100,
                cached_tokens=50,
                completion_tokens=20,
            ),
            record(
                sent_s=2.0, end_s=6.0, ttft_ms=300, tpot_ms=30, prompt_tokens=300, cached_tokens=0, completion_tokens=20
            ),
            record(status="stopped", sent_s=2.0, end_s=5.0, ttft_ms=200, num_deltas=10),
            record(status="error", sent_s=2.0, end_s=11.0, ttft_ms=9999),
            record(status="timeout", end_s=11.0),
            record(status="interrupted", end_s=11.0),
        ],
        SLO(ttft_ms=250, tpot_ms=20),
    )
    assert (summary.requests, summary.ok, summary.stopped, summary.errors, summary.interrupted) == (6, 2, 1, 2, 1)
    assert summary.ttft == Quantiles(200, 280, 298)  # the failed one's time is no part of it
    assert summary.duration_s == pytest.approx(11)  # the timeout was sent at 0
    assert summary.hit_rate == pytest.approx(50 / 400)
    assert summary.output_tokens_per_s == pytest.approx(50 / 11)
    assert summary.qps == pytest.approx(3 / 11)
    assert summary.goodput == pytest.approx(2 / 11)
    assert summary.slo_met == pytest.approx(2 / 6)


def test_rejections_are_no_errors_and_miss_no_slo_of_the_accepted() -> None:
    summary = summarise(
        [
            record(sent_s=0.0, end_s=4.0, ttft_ms=100, predicted_ttft_ms=110, gaps_ms=[1.0, 3.0]),
            record(sent_s=0.0, end_s=4.0, ttft_ms=400, predicted_ttft_ms=200, gaps_ms=[2.0]),
            record(status="rejected", sent_s=1.0, end_s=1.0, e2e_ms=5.0, predicted_ttft_ms=9000),
            record(status="rejected", sent_s=1.0, end_s=1.0, e2e_ms=7.0),
        ],
        SLO(ttft_ms=250),
    )
    assert (summary.requests, summary.ok, summary.rejected, summary.errors) == (4, 2, 2, 0)
    assert (summary.slo_met, summary.slo_met_accepted) == (0.25, 0.5)
    assert summary.goodput == pytest.approx(1 / 4)
    assert summary.rejection is not None
    assert summary.rejection.p50 == 6.0
    assert summary.itl is not None
    assert summary.itl.p50 == 2.0
    assert summary.prediction_error is not None
    assert summary.prediction_error.p50 == pytest.approx((0.1 + 0.5) / 2)  # of those that have a TTFT to compare with


def test_what_is_unknown_stays_unknown() -> None:
    summary = summarise([record(status="error", sent_s=None, end_s=0.0)], SLO())
    assert (summary.ttft, summary.hit_rate, summary.qps, summary.goodput, summary.ledger) == (None,) * 5
    assert summarise([record(ttft_ms=1, prompt_tokens=10)], SLO()).hit_rate is None
    assert summarise([record(ttft_ms=1, prompt_tokens=10, cached_tokens=0)], SLO()).hit_rate == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"ttft_ms": 100.0, "tpot_ms": 50.0}, True),  # at the bar is within it
        ({"ttft_ms": 100.1, "tpot_ms": 50.0}, False),
        ({"ttft_ms": 100.0, "tpot_ms": 50.1}, False),
        ({"ttft_ms": 100.0}, True),
        ({"ttft_ms": 1.0, "status": "error"}, False),
        ({}, False),
    ],
)
def test_who_meets_the_slo(fields: dict[str, Any], expected: bool) -> None:
    assert SLO(100, 50).met_by(record(**fields)) is expected


def test_the_ledger_is_a_mean_in_which_a_missing_part_counts_as_nothing() -> None:
    records = [record(ttft_ms=1, ledger={"queue": 4.0, "prefill": 10.0}), record(ttft_ms=1, ledger={"prefill": 20.0})]
    assert summarise(records, SLO()).ledger == {"queue": 2.0, "prefill": 15.0}


def test_length_errors_are_shown() -> None:
    records = [record(ttft_ms=1, prompt_tokens=n, wanted_prompt_tokens=100) for n in (100, 97, 101)]
    assert summarise(records, SLO()).length_error == 3


def test_rounds_give_medians_and_counts_add_up() -> None:
    rounds = [summarise([record(ttft_ms=ms), record(status="error")], SLO()) for ms in (10, 1000, 20)]
    whole = over_rounds(rounds)
    assert whole.ttft == Quantiles(20, 20, 20)
    assert (whole.requests, whole.ok, whole.errors) == (6, 3, 3)


def test_figures_are_medians_of_the_rounds_that_have_them() -> None:
    assert median_figures([{"a": 1.0}, {"a": 3.0, "b": 5.0}, {"a": 100.0}]) == {"a": 3.0, "b": 5.0}
