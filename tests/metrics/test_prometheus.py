"""The text format, read back by the reference parser."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from headstart.metrics.prometheus import Counter, HistogramFamily, Metric, Sampled, exposition


def parse(*metrics: Metric) -> dict[str, dict[tuple[str, ...], float]]:
    text = exposition(metrics).decode()
    return {
        family.name: {(sample.name, *sample.labels.values()): sample.value for sample in family.samples}
        for family in text_string_to_metric_families(text)
    }


def test_counters_add_by_label() -> None:
    counter = Counter("hits_total", "Hits.", ("route", "status"))
    counter.add(1, "/a", "200")
    counter.add(2, "/a", "200")
    counter.add(1, "/b", "404")
    assert parse(counter) == {"hits": {("hits_total", "/a", "200"): 3.0, ("hits_total", "/b", "404"): 1.0}}
    assert parse(Counter("none_total", "Nothing yet.")) == {"none": {("none_total",): 0.0}}


@given(value=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_label_value_survives(value: str) -> None:
    gauge = Sampled("info", "Constant.", lambda: [((value,), 1.0)], kind="gauge", labels=("model",))
    text = exposition([gauge]).decode()
    (family,) = text_string_to_metric_families(text.replace("\r", "\\r"))  # the parser splits lines at more than \n
    assert family.samples[0].value == 1.0
    if value.isprintable():
        assert family.samples[0].labels["model"] == value


BOUNDS = (0.5, 1.0, 2.0)


@given(values=st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), max_size=30))
def test_histograms_count_every_observation_once(values: list[tuple[float, int]]) -> None:
    family = HistogramFamily("time_seconds", "Time.", BOUNDS)
    for value, count in values:
        family.child().observe(value, count)
    found = parse(family)["time_seconds"]
    for bound in (*BOUNDS, math.inf):
        expected = sum(count for value, count in values if value <= bound)
        label = "+Inf" if bound == math.inf else f"{bound:g}" if bound != 1 and bound != 2 else str(int(bound))
        assert found["time_seconds_bucket", label] == expected
    assert found["time_seconds_count",] == sum(count for _, count in values)
    assert found["time_seconds_sum",] == pytest.approx(sum(value * count for value, count in values))


def test_labelled_histograms_exist_from_the_start() -> None:
    family = HistogramFamily("part_seconds", "Part.", BOUNDS, "part", ("queue", "prefill"))
    family.child("queue").observe(0.7)
    found = parse(family)["part_seconds"]
    assert found["part_seconds_count", "queue"] == 1
    assert found["part_seconds_count", "prefill"] == 0
    with pytest.raises(KeyError):
        family.child("unknown")


def test_bounds_must_ascend() -> None:
    with pytest.raises(AssertionError):
        HistogramFamily("odd_seconds", "Odd.", (2.0, 1.0))
