"""The server's own account of a TTFT, from `Server-Timing` or the usage chunk, against the client's clock."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping

import msgspec

from headstart.bench.record import RequestRecord

PARTS = ("receive", "tokenize", "admit", "queue", "load", "prefill", "interference", "transfer", "sample", "deliver")
TOLERANCE_MS = 3.0
TOLERANCE_SHARE = 0.02

_METRIC = re.compile(r"\s*([!#$%&'*+.^_`|~\w-]+)\s*((?:;[^,]*)?)$")


def parse_server_timing(header: str) -> dict[str, float]:
    """`receive;dur=1.2, tokenize;dur=3` -> milliseconds by part. Other metrics are left out."""
    parts: dict[str, float] = {}
    for entry in header.split(","):
        match = _METRIC.match(entry)
        if match is None or match[1] not in PARTS:
            continue
        for parameter in match[2].split(";"):
            name, _, value = parameter.partition("=")
            if name.strip().lower() == "dur":
                try:
                    parts[match[1]] = parts.get(match[1], 0.0) + float(value.strip().strip('"'))
                except ValueError:
                    continue
    return parts


def from_usage(ledger: Mapping[str, float] | None) -> dict[str, float]:
    """The parts in a usage chunk's ledger (milliseconds), without totals that a server may put beside them."""
    return {name: value for name, value in (ledger or {}).items() if name in PARTS}


class LedgerCheck(msgspec.Struct, kw_only=True):
    """How well the server's account agrees with the client. Differences are client minus server, milliseconds.

    `outside`: requests whose difference exceeds 3 ms and 2 % of their TTFT. `missing`: answers without a ledger.
    """

    checked: int
    missing: int
    outside: int
    median_ms: float | None
    max_ms: float | None  # of the largest magnitude

    @property
    def passed(self) -> bool:
        return self.checked > 0 and self.missing == 0 and self.outside == 0


def check_ledger(records: Iterable[RequestRecord]) -> LedgerCheck:
    """Compare every answered request's ledger with its TTFT."""
    differences: list[float] = []
    missing = outside = 0
    for record in records:
        if not record.answered or record.ttft_ms is None:
            continue
        if record.ledger_ms is None:
            missing += 1
            continue
        difference = record.ttft_ms - record.ledger_ms
        differences.append(difference)
        outside += abs(difference) > max(TOLERANCE_MS, TOLERANCE_SHARE * record.ttft_ms)
    return LedgerCheck(
        checked=len(differences),
        missing=missing,
        outside=outside,
        median_ms=statistics.median(differences) if differences else None,
        max_ms=max(differences, key=abs) if differences else None,
    )
