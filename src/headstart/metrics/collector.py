"""What is measured, under which name: turns `RequestOutput`s, ledgers and HTTP answers into observations.

Owned by the API process' event loop. Knows nothing of HTTP beyond a status, nothing of how requests are served.
Totals that the engine counts anyway (tokens, preemptions) come from its statistics when the metrics are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headstart.core.accuracy import RATIOS
from headstart.core.connector import TierState
from headstart.core.request import FinishReason
from headstart.core.stats import PREFILL_STEP_TOKENS, CoreStats
from headstart.core.step import RequestOutput
from headstart.metrics.ledger import PARTS, Ledger
from headstart.metrics.prometheus import (
    Counter,
    Histogram,
    HistogramFamily,
    Metric,
    Sampled,
    SampledHistogram,
    Samples,
    exposition,
)

PREFILL_STEP_METRIC = "headstart_step_prefill_tokens"
SLO_MET, SLO_MISSED, SLO_REJECTED = "met", "missed", "rejected"
REFUSED = "refused"  # beside the engine's reasons: it was never begun
# 1 ms to 60 s; each bound at most 2.5 times the one before.
SECONDS: tuple[float, ...] = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0),
)
# A part of the ledger is often far below a millisecond.
PART_SECONDS = (0.00005, 0.0001, 0.00025, 0.0005, *SECONDS)
TOKENS = tuple(float(2**power) for power in range(18))


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engine as the metrics see it: whether it serves, and its last known statistics (None before it is ready)."""

    up: bool
    stats: CoreStats | None


class Collector:
    """Every metric of the server. `engine` is asked when the metrics are read."""

    def __init__(
        self,
        engine: Callable[[], EngineView],
        *,
        version: str,
        model: str,
        token_memory: Callable[[], int] = lambda: 0,
        explain_memory: Callable[[], int] = lambda: 0,
    ) -> None:
        """`token_memory`, `explain_memory`: bytes that the tokens of recent texts, and recent prompts, take."""
        self._engine = engine
        self._token_memory = token_memory
        self._explain_memory = explain_memory
        self.ttft = HistogramFamily(
            "headstart_time_to_first_token_seconds", "First byte of the request to the first text written.", SECONDS
        )
        self.parts = HistogramFamily(
            "headstart_ttft_part_seconds",
            "Parts of the time to first token; they sum to it.",
            PART_SECONDS,
            "part",
            PARTS,
        )
        self.itl = HistogramFamily(
            "headstart_inter_token_latency_seconds", "Gap between consecutive tokens of a request.", SECONDS
        )
        self.tpot = HistogramFamily(
            "headstart_request_time_per_output_token_seconds", "Mean gap after the first token, one a request.", SECONDS
        )
        self.e2e = HistogramFamily(
            "headstart_e2e_request_latency_seconds", "First byte of the request to its last token.", SECONDS
        )
        self.queue = HistogramFamily(
            "headstart_request_queue_time_seconds", "Submission to the request's first chunk of prefill.", SECONDS
        )
        self.prompt_tokens = HistogramFamily("headstart_request_prompt_tokens", "Prompt lengths.", TOKENS)
        self.generation_tokens = HistogramFamily("headstart_request_generation_tokens", "Answer lengths.", TOKENS)
        self.prediction = HistogramFamily(
            "headstart_ttft_predicted_over_real_ratio",
            "Time to first token as predicted when a request was let in, over what it was.",
            RATIOS,
        )
        self._slo = Counter(
            "headstart_slo_requests_total", "Requests with a TTFT SLO by what became of it.", ("outcome",)
        )
        self._finished = Counter("headstart_requests_finished_total", "Requests by how they ended.", ("finish_reason",))
        self._responses = Counter("headstart_http_responses_total", "HTTP answers.", ("route", "status"))
        self._tokenized = Counter(
            "headstart_prompt_text_tokens_total",
            "Tokens of prompts given as text, by where they came from.",
            ("source",),
        )
        self._explained = Counter(
            "headstart_explained_prompts_total", "Prompts whose cache miss was explained, by what differed.", ("kind",)
        )
        self._clients_gone = 0
        self._build: dict[str, str] = {"version": version, "model": model}
        # One lookup less for each token.
        self._itl_observe = self.itl.child().observe

    def track(self, received: float, num_prompt_tokens: int) -> RequestTrack:
        """Begin to follow one engine request that the server received at `received` (monotonic seconds)."""
        self.prompt_tokens.child().observe(num_prompt_tokens)
        return RequestTrack(self, received)

    def first_token(self, ledger: Ledger, predicted: float = 0.0, slo: float | None = None) -> None:
        """A complete ledger: its request's first text was just written. `predicted` (0: none), `slo`: seconds."""
        ttft = sum(seconds for _, seconds in ledger)
        self.ttft.child().observe(ttft)
        if predicted > 0 and ttft > 0:
            self.prediction.child().observe(predicted / ttft)
        if slo is not None:
            self.slo(SLO_MET if ttft <= slo else SLO_MISSED)
        for part, seconds in ledger:
            self.parts.child(part).observe(seconds)

    def tokenized(self, *, tokenizer: int, memory: int, sampled: int) -> None:
        """Where a prompt's tokens came from: made anew, remembered of a text, or remembered of an answer."""
        self._tokenized.add(tokenizer, "tokenizer")
        self._tokenized.add(memory, "memory")
        self._tokenized.add(sampled, "sampled")

    def explained(self, kind: str) -> None:
        self._explained.add(1, kind)

    def slo(self, outcome: str) -> None:
        self._slo.add(1, outcome)

    def response(self, route: str, status: int) -> None:
        self._responses.add(1, route, str(status))

    def client_gone(self) -> None:
        """A client closed its connection while its answer was being made."""
        self._clients_gone += 1

    def finished(self, reason: str) -> None:
        self._finished.add(1, reason)

    def note_gap(self, seconds: float, num_tokens: int) -> None:
        self._itl_observe(seconds / num_tokens, num_tokens)

    def exposition(self) -> bytes:
        view = self._engine()
        histograms = (
            *(self.ttft, self.parts, self.itl, self.tpot, self.e2e, self.queue),
            *(self.prompt_tokens, self.generation_tokens, self.prediction),
        )
        aborts = _total("headstart_aborts_total", "HTTP requests whose client left before the end.", self._clients_gone)
        memory = _gauge("headstart_token_memory_bytes", "What the tokens of recent texts take.", self._token_memory())
        prompts = _gauge("headstart_explain_memory_bytes", "What remembered prompts take.", self._explain_memory())
        counters = (
            self._finished,
            self._slo,
            self._responses,
            aborts,
            self._tokenized,
            memory,
            self._explained,
            prompts,
        )
        return exposition((*histograms, *counters, *self._engine_metrics(view)))

    def _engine_metrics(self, view: EngineView) -> tuple[Metric, ...]:
        build = Sampled(
            "headstart_build_info",
            "Constant 1; the labels say what is served.",
            lambda: [(tuple(self._build.values()), 1)],
            kind="gauge",
            labels=tuple(self._build),
        )
        up = _gauge("headstart_engine_up", "1 while the engine is ready.", float(view.up))
        stats = view.stats
        return (build, up) if stats is None else (build, up, *_stats_metrics(stats))


class RequestTrack:
    """Follows one engine request from its outputs. Call `close` once, whatever became of it."""

    __slots__ = ("_closed", "_collector", "_first", "_last", "_num_tokens", "_received")

    def __init__(self, collector: Collector, received: float) -> None:
        self._collector = collector
        self._received = received
        self._first = self._last = 0.0
        self._num_tokens = 0
        self._closed = False

    def observe(self, output: RequestOutput) -> None:
        new = output.num_output_tokens - self._num_tokens
        if self._last and new > 0:
            self._collector.note_gap(output.time - self._last, new)
        if new > 0:
            self._first = self._first or output.time
            self._last = output.time
            self._num_tokens = output.num_output_tokens
        if output.ledger:
            queue = sum(seconds for part, seconds in output.ledger if part in ("admit", "queue"))
            self._collector.queue.child().observe(queue)
        if output.finish_reason is not None:
            self._finish(output.finish_reason.value, output.time)

    def close(self, reason: str = FinishReason.ABORT.value) -> None:
        """The server stopped listening: for `reason`, unless the engine had finished the request before."""
        self._finish(reason, self._last)

    def _finish(self, reason: str, time: float) -> None:
        if self._closed:
            return
        self._closed = True
        collector = self._collector
        collector.finished(reason)
        if self._num_tokens and reason in (FinishReason.STOP.value, FinishReason.LENGTH.value):
            collector.e2e.child().observe(time - self._received)
            collector.generation_tokens.child().observe(self._num_tokens)
            if self._num_tokens > 1:
                collector.tpot.child().observe((self._last - self._first) / (self._num_tokens - 1))


def _gauge(name: str, text: str, value: float) -> Sampled:
    samples: Samples = [((), value)]
    return Sampled(name, text, lambda: samples, kind="gauge")


def _total(name: str, text: str, value: float) -> Sampled:
    samples: Samples = [((), value)]
    return Sampled(name, text, lambda: samples, kind="counter")


def _stats_metrics(stats: CoreStats) -> tuple[Metric, ...]:
    tokens: Samples = [
        (("prompt_computed",), stats.prompt_tokens_computed),
        (("prompt_cached",), stats.prompt_tokens_cached),
        (("prompt_loaded",), stats.prompt_tokens_loaded),
        (("generated",), stats.generated_tokens),
    ]
    ratios = stats.step_ratios or (0,) * (len(RATIOS) + 1)
    used = (stats.num_blocks - stats.num_free_blocks) / stats.num_blocks
    return (
        Sampled("headstart_tokens_total", "Tokens by kind.", lambda: tokens, kind="counter", labels=("kind",)),
        _gauge("headstart_num_requests_running", "Requests that hold KV blocks.", stats.num_running),
        _gauge("headstart_num_requests_waiting", "Requests in the queue.", stats.num_waiting),
        _gauge("headstart_kv_cache_usage_ratio", "Share of the KV blocks that requests hold.", used),
        _gauge("headstart_kv_blocks", "Blocks of the KV pool.", stats.num_blocks),
        _gauge("headstart_prefix_cache_blocks", "Blocks that the prefix cache can match.", stats.num_cached_blocks),
        _total(
            "headstart_prefix_cache_evicted_blocks_total", "Cached blocks given up for others.", stats.evicted_blocks
        ),
        _gauge("headstart_num_requests_loading", "Requests that wait for KV from a tier.", stats.num_loading),
        _total("headstart_kv_loads_total", "Loads of KV from a tier, by requests that are through.", stats.loads),
        _total(
            "headstart_kv_loads_cut_short_total",
            "Loads that failed or did not keep pace with recomputing.",
            stats.loads_cut_short,
        ),
        _total("headstart_engine_steps_total", "Steps computed.", stats.steps),
        SampledHistogram(
            PREFILL_STEP_METRIC,
            "Prompt tokens that a step computed, of steps with any: the chunk sizes chosen.",
            Histogram.of(PREFILL_STEP_TOKENS, stats.prefill_steps, stats.prompt_tokens_computed),
        ),
        SampledHistogram(
            "headstart_step_predicted_over_real_ratio",
            "Time of a step as predicted when it began, over what it took.",
            Histogram.of(RATIOS, ratios, stats.step_ratios_sum),
        ),
        _total(
            "headstart_preemptions_total", "Requests that lost their blocks to another for a while.", stats.preemptions
        ),
        *_tier_metrics(stats),
    )


def _tier_metrics(stats: CoreStats) -> tuple[Metric, ...]:
    if not stats.tiers:
        return ()

    def gauge(name: str, text: str, value: Callable[[TierState], float]) -> Sampled:
        samples: Samples = [((tier.kind,), value(tier)) for tier in stats.tiers]
        return Sampled(name, text, lambda: samples, kind="gauge", labels=("tier",))

    return (
        gauge("headstart_kv_tier_up", "1 while the tier works; 0: it failed.", lambda tier: float(tier.is_on)),
        gauge("headstart_kv_tier_blocks", "Blocks that the tier holds.", lambda tier: tier.num_blocks),
        gauge("headstart_kv_tier_bytes", "What the tier takes in memory or files.", lambda tier: tier.num_bytes),
        _total(
            "headstart_kv_tier_dropped_blocks_total",
            "Blocks that left the prefix cache faster than a tier could keep them.",
            stats.tier_dropped_blocks,
        ),
    )
