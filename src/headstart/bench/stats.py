"""Records to numbers: percentiles, rates, goodput, medians over rounds. Pure; prints nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec

from headstart.bench.record import RequestRecord


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of `values` lie, linear between neighbours. `values` must not be empty."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class Quantiles(msgspec.Struct):
    """Of one quantity; a time is in milliseconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Quantiles | None:
        known = [value for value in values if value is not None]
        return cls(*(percentile(known, share) for share in (0.5, 0.9, 0.99))) if known else None


class GroupSummary(msgspec.Struct, kw_only=True):
    """One group of requests at one target; over several rounds: the median of each number, counts added up.

    Latencies are of answered requests only; `errors` counts the others. Rates count from the first request sent to the
    last end. `itl`: of every gap between two deltas. `rejection`: how long it took to say no. `prediction_error`: of
    the server's predictions of the TTFT, as shares of the TTFT, whatever their sign. `hit_rate`: cached share of the
    prompt tokens; None if the server does not report it. `goodput`: requests a second that met every SLO given;
    `slo_met` their share of all requests, `slo_met_accepted` of those that were not rejected. `length_error`: largest
    difference between a prompt's counted and wanted tokens. `ledger`: mean milliseconds by part.
    """

    target: str
    group: str
    requests: int
    ok: int
    stopped: int
    rejected: int
    errors: int
    interrupted: int
    duration_s: float
    ttft: Quantiles | None
    tpot: Quantiles | None
    itl: Quantiles | None
    max_gap: Quantiles | None
    e2e: Quantiles | None
    rejection: Quantiles | None
    prediction_error: Quantiles | None
    hit_rate: float | None
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    qps: float | None
    goodput: float | None
    slo_met: float | None
    slo_met_accepted: float | None
    late_max_ms: float
    length_error: int | None
    ledger: dict[str, float] | None


class SLO(msgspec.Struct, frozen=True):
    """What a request must meet to count as good, in milliseconds; None: no demand."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def met_by(self, record: RequestRecord) -> bool:
        """A failed request meets nothing; an answer of one token has no TPOT to miss."""
        if not record.answered or record.ttft_ms is None:
            return False
        if self.ttft_ms is not None and record.ttft_ms > self.ttft_ms:
            return False
        return self.tpot_ms is None or record.tpot_ms is None or record.tpot_ms <= self.tpot_ms


def summarise(records: Sequence[RequestRecord], slo: SLO) -> GroupSummary:
    """One group of one target in one round. `records` must not be empty."""
    answered = [record for record in records if record.answered]
    sent = [record.sent_s for record in records if record.sent_s is not None]
    duration = max(record.end_s for record in records) - min(sent) if sent else 0.0
    good = sum(slo.met_by(record) for record in records)
    num_rejected = sum(record.status == "rejected" for record in records)
    num_accepted = len(records) - num_rejected

    def rate(amount: float) -> float | None:
        return amount / duration if duration > 0 and answered else None

    return GroupSummary(
        target=records[0].target,
        group=records[0].group,
        requests=len(records),
        ok=sum(record.status == "ok" for record in records),
        stopped=sum(record.status == "stopped" for record in records),
        rejected=num_rejected,
        errors=sum(record.failed for record in records),
        interrupted=sum(record.status == "interrupted" for record in records),
        duration_s=duration,
        ttft=Quantiles.of(record.ttft_ms for record in answered),
        tpot=Quantiles.of(record.tpot_ms for record in answered),
        itl=Quantiles.of(gap for record in answered for gap in record.gaps_ms),
        max_gap=Quantiles.of(record.max_gap_ms for record in answered),
        e2e=Quantiles.of(record.e2e_ms for record in answered if record.status == "ok"),
        rejection=Quantiles.of(record.e2e_ms for record in records if record.status == "rejected"),
        prediction_error=Quantiles.of(_prediction_error(record) for record in answered),
        hit_rate=_hit_rate(answered),
        prompt_tokens_per_s=rate(sum(record.prompt_tokens or 0 for record in answered)),
        output_tokens_per_s=rate(sum(record.completion_tokens or record.num_deltas for record in answered)),
        qps=rate(len(answered)),
        goodput=rate(good) if slo else None,
        slo_met=good / len(records) if slo else None,
        slo_met_accepted=good / num_accepted if slo and num_accepted else None,
        late_max_ms=max(record.late_ms for record in records),
        length_error=_length_error(answered),
        ledger=_mean_ledger(answered),
    )


def _prediction_error(record: RequestRecord) -> float | None:
    if not record.predicted_ttft_ms or not record.ttft_ms:
        return None
    return abs(record.predicted_ttft_ms - record.ttft_ms) / record.ttft_ms


def _hit_rate(records: Iterable[RequestRecord]) -> float | None:
    known = [(record.cached_tokens, record.prompt_tokens) for record in records if record.prompt_tokens]
    if not known or all(cached is None for cached, _ in known):
        return None
    return sum(cached or 0 for cached, _ in known) / sum(prompt for _, prompt in known)


def _length_error(records: Iterable[RequestRecord]) -> int | None:
    errors = [
        abs(record.prompt_tokens - record.wanted_prompt_tokens)
        for record in records
        if record.prompt_tokens is not None and record.wanted_prompt_tokens is not None
    ]
    return max(errors) if errors else None


def _mean_ledger(records: Iterable[RequestRecord]) -> dict[str, float] | None:
    ledgers = [record.ledger for record in records if record.ledger]
    names = dict.fromkeys(name for ledger in ledgers for name in ledger)
    return {name: statistics.fmean(ledger.get(name, 0.0) for ledger in ledgers) for name in names} or None


def over_rounds(rounds: Sequence[GroupSummary]) -> GroupSummary:
    """Several rounds of one group as one: medians of what is measured, sums of what is counted. Must not be empty."""

    def middle(field: Callable[[GroupSummary], float | None]) -> float | None:
        known = [value for summary in rounds if (value := field(summary)) is not None]
        return statistics.median(known) if known else None

    def quantiles(field: Callable[[GroupSummary], Quantiles | None]) -> Quantiles | None:
        known = [value for summary in rounds if (value := field(summary)) is not None]
        if not known:
            return None
        return Quantiles(*(statistics.median(getattr(q, name) for q in known) for name in Quantiles.__struct_fields__))

    length_errors = [summary.length_error for summary in rounds if summary.length_error is not None]
    return GroupSummary(
        target=rounds[0].target,
        group=rounds[0].group,
        requests=sum(summary.requests for summary in rounds),
        ok=sum(summary.ok for summary in rounds),
        stopped=sum(summary.stopped for summary in rounds),
        rejected=sum(summary.rejected for summary in rounds),
        errors=sum(summary.errors for summary in rounds),
        interrupted=sum(summary.interrupted for summary in rounds),
        duration_s=sum(summary.duration_s for summary in rounds),
        ttft=quantiles(lambda summary: summary.ttft),
        tpot=quantiles(lambda summary: summary.tpot),
        itl=quantiles(lambda summary: summary.itl),
        max_gap=quantiles(lambda summary: summary.max_gap),
        e2e=quantiles(lambda summary: summary.e2e),
        rejection=quantiles(lambda summary: summary.rejection),
        prediction_error=quantiles(lambda summary: summary.prediction_error),
        hit_rate=middle(lambda summary: summary.hit_rate),
        prompt_tokens_per_s=middle(lambda summary: summary.prompt_tokens_per_s),
        output_tokens_per_s=middle(lambda summary: summary.output_tokens_per_s),
        qps=middle(lambda summary: summary.qps),
        goodput=middle(lambda summary: summary.goodput),
        slo_met=middle(lambda summary: summary.slo_met),
        slo_met_accepted=middle(lambda summary: summary.slo_met_accepted),
        late_max_ms=max(summary.late_max_ms for summary in rounds),
        length_error=max(length_errors) if length_errors else None,
        ledger=_median_ledger([summary.ledger for summary in rounds if summary.ledger]),
    )


def _median_ledger(ledgers: Sequence[dict[str, float]]) -> dict[str, float] | None:
    names = dict.fromkeys(name for ledger in ledgers for name in ledger)
    return {name: statistics.median(ledger.get(name, 0.0) for ledger in ledgers) for name in names} or None


def median_figures(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each figure's median over the rounds that have it."""
    names = dict.fromkeys(name for figures in rounds for name in figures)
    return {name: statistics.median(figures[name] for figures in rounds if name in figures) for name in names}
