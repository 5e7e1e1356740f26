"""One request's record: what the client saw, in the form that `--json` writes. Knows neither HTTP nor workloads."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "stopped", "rejected", "error", "timeout", "interrupted"]


class RequestRecord(msgspec.Struct, kw_only=True, omit_defaults=False):
    """Times are in milliseconds but for those that end in `_s`: seconds since the round began.

    `status`: `stopped` is a stream that the workload itself ended and no error; `rejected` one that the server would
    not take now (HTTP 429), and said so within `e2e_ms`; `interrupted` one that Ctrl-C ended.
    `ttft_ms`: request written to the socket -> first non-empty content, reasoning or tool delta.
    `predicted_ttft_ms`: what the server said that it would be, when it let the request in or rejected it.
    `max_gap_ms`: largest time between two deltas; of a stopped stream the time from its last delta to its end counts.
    `gaps_ms`: the time from each delta to the next.
    `late_ms`: how much later than planned it was sent. `connect_ms`: 0 on a kept connection; no part of the TTFT.
    `ledger`: the server's own account of the TTFT, by part; `ledger_ms` its sum.
    """

    target: str
    round: int
    group: str
    index: int
    status: Status = "error"
    http_status: int | None = None
    error: str | None = None
    planned_s: float = 0.0
    sent_s: float | None = None
    end_s: float = 0.0
    late_ms: float = 0.0
    connect_ms: float = 0.0
    wanted_prompt_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    num_deltas: int = 0
    finish_reason: str | None = None
    ttft_ms: float | None = None
    predicted_ttft_ms: float | None = None
    tpot_ms: float | None = None
    max_gap_ms: float | None = None
    gaps_ms: list[float] = msgspec.field(default_factory=list)
    e2e_ms: float | None = None
    ledger: dict[str, float] | None = None
    ledger_ms: float | None = None

    @property
    def answered(self) -> bool:
        """Whether its times are those of a real answer."""
        return self.status in ("ok", "stopped") and self.ttft_ms is not None

    @property
    def failed(self) -> bool:
        return self.status in ("error", "timeout")
