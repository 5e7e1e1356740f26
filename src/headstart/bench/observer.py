"""Watches one streamed answer and takes its times. Fed by the socket; knows nothing of connections or of schedules."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import msgspec

from headstart.bench.ledger import from_usage, parse_server_timing
from headstart.bench.record import RequestRecord
from headstart.bench.sse import Choice, Chunk, SSEParser, Usage, decode_chunk, error_message

PREDICTED_HEADER = "x-headstart-predicted-ttft-ms"


class StreamObserver:
    """A `Sink`. Times are `time.perf_counter()` seconds. `first_delta` is set when the first token arrives."""

    def __init__(self, *, keep_text: bool = False) -> None:
        self.status: int | None = None
        self.error: str | None = None
        self.sent: float | None = None
        self.first: float | None = None
        self.last: float | None = None
        self.gaps: list[float] = []
        self.num_deltas = 0
        self.usage = Usage()
        self.finish_reason: str | None = None
        self.text: list[str] = []
        self.first_delta = asyncio.Event()
        self.done_marker = False
        self.stopped = False  # set by whoever ends the stream on purpose
        self._keep_text = keep_text
        self._timing = self._predicted = ""
        self._streams = False
        self._parser = SSEParser()
        self._body = bytearray()

    def on_sent(self, now: float) -> None:
        self.sent = now

    def on_head(self, status: int, headers: dict[str, str], now: float) -> None:
        self.status = status
        self._timing = headers.get("server-timing", "")
        self._predicted = headers.get(PREDICTED_HEADER, "")
        self._streams = status == 200 and "event-stream" in headers.get("content-type", "")

    def on_body(self, data: bytes, now: float) -> None:
        if not self._streams:
            self._body += data
            return
        for payload in self._parser.feed(data):
            if payload == b"[DONE]":
                self.done_marker = True
                continue
            try:
                chunk = decode_chunk(payload)
            except msgspec.DecodeError as error:
                self.error = self.error or f"unreadable event {payload[:80]!r}: {error}"
                continue
            self._on_chunk(chunk, payload, now)

    def finish(self) -> None:
        """The response is complete: settle what is wrong with it, if anything."""
        if self.status != 200:
            self.error = self.error or f"HTTP {self.status}: {error_message(bytes(self._body))}"
        elif not self._streams:
            self.error = self.error or "the server answered without a stream, though stream=true was asked"
        elif self.first is None:
            self.error = self.error or "the stream ended without a single token"
        elif self.finish_reason is None and not self.done_marker:
            self.error = self.error or "the stream broke off: neither a finish_reason nor [DONE]"

    def _on_chunk(self, chunk: Chunk, payload: bytes, now: float) -> None:
        if chunk.error is not None:
            self.error = self.error or error_message(payload)
        if chunk.usage is not None:
            self.usage = chunk.usage
        says_something = False
        for choice in chunk.choices or ():
            self.finish_reason = choice.finish_reason or self.finish_reason
            if choice.says_something:
                says_something = True
                if self._keep_text:
                    self.text.append(_text(choice))
        if says_something:
            self._on_delta(now)

    def _on_delta(self, now: float) -> None:
        self.num_deltas += 1
        if self.last is None:
            self.first = now
            self.first_delta.set()
        else:
            self.gaps.append(now - self.last)
        self.last = now

    # -- what a record takes from it

    def fill(self, record: RequestRecord, *, end: float, since: Callable[[float], float]) -> None:
        """Write what was seen into `record`. `end`: when the exchange ended; `since`: seconds since the round began."""
        record.http_status = self.status
        record.error = self.error
        record.end_s = since(end)
        record.num_deltas = self.num_deltas
        record.finish_reason = self.finish_reason
        record.prompt_tokens = self.usage.prompt_tokens
        record.completion_tokens = self.usage.completion_tokens
        if self.usage.prompt_tokens_details is not None:
            record.cached_tokens = self.usage.prompt_tokens_details.cached_tokens
        if self.sent is None:
            return
        record.sent_s = since(self.sent)
        record.late_ms = max(0.0, record.sent_s - record.planned_s) * 1e3
        record.e2e_ms = ((self.last if record.status == "ok" and self.last else end) - self.sent) * 1e3
        self._fill_ledger(record)
        record.predicted_ttft_ms = _milliseconds(self._predicted) or self.usage.predicted_ttft_ms
        if self.first is None or self.last is None:
            return
        record.ttft_ms = (self.first - self.sent) * 1e3
        record.gaps_ms = [round(gap * 1e3, 2) for gap in self.gaps]
        gaps = [*self.gaps, end - self.last] if record.status == "stopped" else self.gaps
        record.max_gap_ms = max(gaps) * 1e3 if gaps else None
        tokens = record.completion_tokens or self.num_deltas
        if tokens > 1:
            record.tpot_ms = (self.last - self.first) / (tokens - 1) * 1e3

    def _fill_ledger(self, record: RequestRecord) -> None:
        parts = parse_server_timing(self._timing) or from_usage(self.usage.ttft_ledger)
        if parts:
            record.ledger = parts
            record.ledger_ms = sum(parts.values())
        elif self.usage.ttft_ms is not None:
            record.ledger_ms = self.usage.ttft_ms


def _milliseconds(header: str) -> float | None:
    try:
        value = float(header)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def _text(choice: Choice) -> str:
    return choice.text or (choice.delta.content if choice.delta else None) or ""
