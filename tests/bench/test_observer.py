"""What the observer makes of a stream whose every moment is known: times are given, not waited for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headstart.bench.observer import StreamObserver
from headstart.bench.record import RequestRecord, Status

BEGAN = 100.0


def event(*choices: dict[str, Any], **fields: Any) -> bytes:
    return b"data: " + json.dumps({"choices": list(choices), **fields}).encode() + b"\n\n"


def say(text: str, **fields: Any) -> bytes:
    return event({"delta": {"content": text}, **fields})


def observed(*parts: tuple[float, bytes], headers: dict[str, str] | None = None) -> StreamObserver:
    observer = StreamObserver()
    observer.on_sent(BEGAN + 1.0)
    observer.on_head(200, {"content-type": "text/event-stream; charset=utf-8"} | (headers or {}), BEGAN + 1.01)
    for now, data in parts:
        observer.on_body(data, BEGAN + now)
    return observer


def record_of(observer: StreamObserver, *, end: float, status: Status = "ok", planned: float = 1.0) -> RequestRecord:
    record = RequestRecord(target="server", round=0, group="g", index=0, status=status, planned_s=planned)
    observer.fill(record, end=BEGAN + end, since=lambda when: when - BEGAN)
    return record


def test_ttft_is_from_the_write_to_the_first_delta_that_says_something() -> None:
    observer = observed(
        (1.1, event({"delta": {"role": "assistant"}})),
        (1.2, say("")),
        (1.5, say("Hello")),
        (1.6, say("", finish_reason="stop")),
        (1.7, b"data: [DONE]\n\n"),
    )
    observer.finish()
    record = record_of(observer, end=1.7)
    assert record.error is None
    assert record.ttft_ms == pytest.approx(500)
    assert record.e2e_ms == pytest.approx(500)
    assert (record.num_deltas, record.tpot_ms, record.max_gap_ms) == (1, None, None)


def test_tpot_counts_tokens_and_the_largest_gap_counts_deltas() -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    observer = observed((1.5, say("a")), (1.6, say("bc")), (2.3, say("de")), (2.4, event(usage=usage)))
    record = record_of(observer, end=2.5)
    assert record.tpot_ms == pytest.approx(800 / 4)
    assert record.max_gap_ms == pytest.approx(700)
    assert record.gaps_ms == pytest.approx([100, 700])
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (10, 4, 5)


def test_deltas_that_come_in_one_read_have_no_gap() -> None:
    record = record_of(observed((1.5, say("a") + say("b") + say("c"))), end=1.5)
    assert (record.num_deltas, record.max_gap_ms, record.tpot_ms) == (3, 0.0, 0.0)


def test_a_stopped_stream_is_charged_for_the_silence_before_its_end() -> None:
    parts = (1.5, say("a")), (1.6, say("b"))
    assert record_of(observed(*parts), end=9.6, status="stopped").max_gap_ms == pytest.approx(8000)
    assert record_of(observed(*parts), end=9.6, status="ok").max_gap_ms == pytest.approx(100)


def test_lateness_is_against_the_plan() -> None:
    assert record_of(observed((1.5, say("a"))), end=2, planned=0.75).late_ms == pytest.approx(250)


def test_ledger_from_the_header_and_from_the_usage_chunk() -> None:
    header = {"server-timing": "receive;dur=1.5, prefill;dur=20, cdn;dur=99"}
    record = record_of(observed((1.5, say("a")), headers=header), end=2)
    assert record.ledger == {"receive": 1.5, "prefill": 20.0}
    assert record.ledger_ms == pytest.approx(21.5)

    usage = {"ttft_ms": 7.0, "ttft_ledger": {"queue": 3.0, "prefill": 4.0, "total": 7.0}}
    record = record_of(observed((1.5, say("a") + event(usage=usage))), end=2)
    assert record.ledger == {"queue": 3.0, "prefill": 4.0}
    assert record.ledger_ms == pytest.approx(7)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"data: {nonsense\n\n", "unreadable event"),
        (b'data: {"error":{"message":"the engine died"}}\n\n', "the engine died"),
        (say(""), "without a single token"),
        (say("a"), "broke off"),
    ],
)
def test_a_stream_that_goes_wrong_is_an_error(data: bytes, expected: str) -> None:
    observer = observed((1.5, data))
    observer.finish()
    assert observer.error is not None
    assert expected in observer.error


def test_a_refusal_and_an_answer_without_a_stream_are_errors() -> None:
    observer = StreamObserver()
    observer.on_head(429, {"content-type": "application/json"}, 1.0)
    observer.on_body(b'{"error":{"message":"queue is full"}}', 1.0)
    observer.finish()
    assert observer.error == "HTTP 429: queue is full"

    observer = StreamObserver()
    observer.on_head(200, {"content-type": "application/json"}, 1.0)
    observer.finish()
    assert observer.error is not None
    assert "without a stream" in observer.error


@pytest.mark.parametrize(
    ("header", "usage", "expected"),
    [
        ("412.5", {}, 412.5),
        ("", {"predicted_ttft_ms": 80.0}, 80.0),
        ("soon", {}, None),
        ("nan", {}, None),
        ("", {}, None),
    ],
)
def test_the_prediction_is_the_headers_or_else_the_usages(
    header: str, usage: dict[str, float], expected: float | None
) -> None:
    headers = {"x-headstart-predicted-ttft-ms": header} if header else None
    observer = observed((1.5, say("a")), (1.6, event(usage=usage)), headers=headers)
    assert record_of(observer, end=1.7).predicted_ttft_ms == expected
