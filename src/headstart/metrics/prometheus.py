"""Counters, gauges and histograms in the Prometheus text format (version 0.0.4). Owns no metric by name.

Our own rather than `prometheus_client`: an observation is made for every token, and costs a fraction of that library's
(see docs/reference/metrics.md). One owner, one thread: there are no locks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Metric(Protocol):
    def render(self) -> Iterable[str]: ...


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    return ",".join(f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))


def _head(name: str, kind: str, text: str) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


class Counter:
    """A total by label values; `name` ends with `_total`."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...] = ()) -> None:
        assert name.endswith("_total")
        self._head, self._name, self._label_names = _head(name, "counter", text), name, labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, amount: float = 1.0, *values: str) -> None:
        assert len(values) == len(self._label_names)
        self._values[values] = self._values.get(values, 0.0) + amount

    def render(self) -> Iterable[str]:
        yield self._head
        for values, total in sorted(self._values.items()):
            labels = f"{{{_labels(self._label_names, values)}}}" if values else ""
            yield f"{self._name}{labels} {_number(total)}\n"


Samples = Iterable[tuple[tuple[str, ...], float]]


class Sampled:
    """A gauge or counter that is asked for when the metrics are read: `sample() -> [(label values, value)]`."""

    def __init__(
        self, name: str, text: str, sample: Callable[[], Samples], *, kind: str, labels: tuple[str, ...] = ()
    ) -> None:
        assert kind in ("gauge", "counter")
        self._head, self._name, self._label_names, self._sample = _head(name, kind, text), name, labels, sample

    def render(self) -> Iterable[str]:
        yield self._head
        for values, value in self._sample():
            labels = f"{{{_labels(self._label_names, values)}}}" if values else ""
            yield f"{self._name}{labels} {_number(value)}\n"


class Histogram:
    """Observations in buckets; `bounds` are upper bounds, ascending, without infinity."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    @classmethod
    def of(cls, bounds: Sequence[float], counts: Sequence[int], total: float) -> Histogram:
        """What was counted elsewhere, in as many buckets; `total`: the sum of all observations."""
        found = cls(bounds)
        assert len(counts) == len(found._counts)
        found._counts, found._sum = list(counts), total
        return found

    def observe(self, value: float, count: int = 1) -> None:
        """Note `value`, `count` times over."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def lines(self, name: str, labels: str) -> Iterable[str]:
        comma = "," if labels else ""
        total = 0
        for bound, count in zip((*map(_number, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels}{comma}le="{bound}"}} {total}\n'
        around = f"{{{labels}}}" if labels else ""
        yield f"{name}_sum{around} {self._sum!r}\n{name}_count{around} {total}\n"


class HistogramFamily:
    """One histogram for each value of a label, or a single one. All exist from the start, so that rates are defined."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], label: str | None = None, values: Sequence[str] = ()
    ) -> None:
        assert list(bounds) == sorted(set(bounds))
        self._head, self._name, self._label = _head(name, "histogram", text), name, label
        self._children = {value: Histogram(bounds) for value in (values if label else ("",))}

    def child(self, value: str = "") -> Histogram:
        return self._children[value]

    def render(self) -> Iterable[str]:
        yield self._head
        for value, child in self._children.items():
            yield from child.lines(self._name, _labels((self._label,), (value,)) if self._label else "")


class SampledHistogram:
    """A histogram that was counted elsewhere and is rendered once."""

    def __init__(self, name: str, text: str, histogram: Histogram) -> None:
        self._head, self._name, self._histogram = _head(name, "histogram", text), name, histogram

    def render(self) -> Iterable[str]:
        yield self._head
        yield from self._histogram.lines(self._name, "")


def exposition(metrics: Iterable[Metric]) -> bytes:
    return "".join(line for metric in metrics for line in metric.render()).encode()
