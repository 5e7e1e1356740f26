"""The result of a run: what `--json` writes and what the table shows. Built from records; sends and prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from headstart.bench.chunks import ChunkClass
from headstart.bench.ledger import LedgerCheck
from headstart.bench.options import BenchError
from headstart.bench.record import RequestRecord
from headstart.bench.stats import GroupSummary

SCHEMA: Literal["headstart.bench/1"] = "headstart.bench/1"  # a change that breaks a reader raises the number


class TargetInfo(msgspec.Struct, kw_only=True):
    """A server as the run found it. `exact_lengths`: its token counts were what the prompts were made for."""

    name: str
    url: str
    model: str
    server: str
    exact_lengths: bool
    template_tokens: int


class Ratio(msgspec.Struct, kw_only=True):
    """One number of the first target over the same number of the second."""

    group: str
    metric: str
    first: float
    second: float
    ratio: float | None


class Report(msgspec.Struct, kw_only=True):
    """Everything of a run. `groups` and `figures` are medians over the rounds; `records` holds every request.

    `chunks` (by target): how many steps computed how many prompt tokens. `ledger` (by target) is there only if the
    check was asked for.
    """

    schema: Literal["headstart.bench/1"] = SCHEMA
    version: str
    started_at: str
    workload: str
    options: dict[str, Any]
    targets: list[TargetInfo]
    rounds: int
    interrupted: bool
    notes: list[str]
    groups: list[GroupSummary]
    figures: dict[str, dict[str, float]]
    chunks: dict[str, list[ChunkClass]]
    ratios: list[Ratio]
    ledger: dict[str, LedgerCheck] | None
    records: list[RequestRecord]

    @property
    def num_errors(self) -> int:
        return sum(record.failed for record in self.records)

    @property
    def num_rejected(self) -> int:
        return sum(record.status == "rejected" for record in self.records)

    @property
    def num_answered(self) -> int:
        return sum(record.answered for record in self.records)


def write_report(report: Report, path: Path) -> None:
    """As indented JSON. Raises `BenchError` if the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error}") from None


def read_report(path: Path) -> Report:
    """What `write_report` wrote. Raises `BenchError` for another schema or a damaged file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"{path} is no {SCHEMA} report: {error}") from None


def ratios(groups: Sequence[GroupSummary], figures: dict[str, dict[str, float]], names: Sequence[str]) -> list[Ratio]:
    """First target over second, for what both have: medians of each group, then the workload's figures."""
    if len(names) != 2:
        return []
    first_name, second_name = names
    by_key = {(summary.target, summary.group): summary for summary in groups}
    found: list[Ratio] = []
    for summary in groups:
        other = by_key.get((second_name, summary.group))
        if summary.target == first_name and other is not None:
            theirs = _numbers(other)
            found += [
                _ratio(summary.group, metric, value, theirs[metric])
                for metric, value in _numbers(summary).items()
                if metric in theirs
            ]
    ours, theirs = figures.get(first_name, {}), figures.get(second_name, {})
    return found + [_ratio("", name, value, theirs[name]) for name, value in ours.items() if name in theirs]


def _ratio(group: str, metric: str, first: float, second: float) -> Ratio:
    return Ratio(group=group, metric=metric, first=first, second=second, ratio=first / second if second else None)


def _numbers(summary: GroupSummary) -> dict[str, float]:
    numbers: dict[str, float | None] = {}
    for name, quantiles in (
        ("ttft", summary.ttft),
        ("tpot", summary.tpot),
        ("itl", summary.itl),
        ("max_gap", summary.max_gap),
    ):
        if quantiles is not None:
            numbers[f"{name}_p50_ms"], numbers[f"{name}_p99_ms"] = quantiles.p50, quantiles.p99
    numbers["e2e_p50_ms"] = summary.e2e.p50 if summary.e2e else None
    numbers["output_tokens_per_s"] = summary.output_tokens_per_s
    numbers["qps"] = summary.qps
    numbers["goodput"] = summary.goodput
    numbers["prediction_error_p50"] = summary.prediction_error.p50 if summary.prediction_error else None
    return {name: value for name, value in numbers.items() if value is not None}
