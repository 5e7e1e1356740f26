"""Options: what is refused, by which name, and what lengths may look like."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

import pytest

from headstart.bench.options import BenchError, BenchOptions, LengthDist, validate


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": 0.0}, "--rate is 0.0; it must be above 0"),
        ({"rate": float("nan")}, "--rate is nan"),
        ({"speed": float("inf")}, "--speed"),
        ({"slo_ttft_ms": -1.0}, "--slo-ttft is -1"),
        ({"rounds": 0}, "--rounds is 0; it must be at least 1"),
        ({"requests": 0}, "--requests"),
        ({"lengths": ()}, "--lengths"),
        ({"lengths": (5, 0)}, "--lengths"),
        ({"workload": "trace"}, "needs --file"),
        ({"workload": "chat", "api": "completions"}, "--api chat only"),
        ({"workload": "other"}, "must be one of idle"),
        ({"api": "other"}, "must be one of chat"),
    ],
)
def test_what_cannot_work_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        validate(replace(BenchOptions(), **change))


def test_the_defaults_are_valid() -> None:
    assert validate(BenchOptions()) == BenchOptions()


def test_lengths_are_drawn_from_what_was_written() -> None:
    rng = random.Random(0)
    assert {LengthDist.parse("7").draw(rng) for _ in range(20)} == {7}
    assert {LengthDist.parse("3-5").draw(rng) for _ in range(200)} == {3, 4, 5}
    wide = [LengthDist.parse("log:32-2048").draw(rng) for _ in range(2000)]
    assert 32 <= min(wide) <= max(wide) <= 2048
    assert 230 < sorted(wide)[1000] < 285, "as many below 256 as above"
    drawn = [LengthDist.parse("lognormal:200:0.5").draw(rng) for _ in range(2000)]
    assert statistics.median(drawn) == pytest.approx(200, rel=0.1)
    assert min(LengthDist.parse("lognormal:1:5").draw(rng) for _ in range(200)) == 1


@pytest.mark.parametrize(
    "text", ["", "0", "x", "5-3", "0-3", "lognormal:5", "lognormal:0:1", "lognormal:5:-1", "lognormal:a:b"]
)
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(BenchError, match="write a number"):
        LengthDist.parse(text)
