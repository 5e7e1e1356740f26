"""Reading `Server-Timing`, and the bar that client and server must agree within."""

from __future__ import annotations

import pytest

from headstart.bench.ledger import check_ledger, parse_server_timing
from headstart.bench.record import RequestRecord, Status


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("receive;dur=1.2, tokenize;dur=3", {"receive": 1.2, "tokenize": 3.0}),
        ('queue;desc="waiting";dur="4.5",prefill; DUR=2', {"queue": 4.5, "prefill": 2.0}),
        ("prefill;dur=1, prefill;dur=2", {"prefill": 3.0}),
        ("total;dur=99, cdn, queue;dur=x, sample", {}),
        ("", {}),
        (";;;,,,= =", {}),
    ],
)
def test_server_timing(header: str, expected: dict[str, float]) -> None:
    assert parse_server_timing(header) == expected


def record(ttft: float, ledger: float | None, status: Status = "ok") -> RequestRecord:
    return RequestRecord(target="t", round=0, group="g", index=0, status=status, ttft_ms=ttft, ledger_ms=ledger)


def test_three_milliseconds_or_two_percent_whichever_is_more() -> None:
    within = [record(10, 7), record(10, 13), record(1000, 980.5), record(1000, 1019)]
    assert check_ledger(within).passed
    assert not check_ledger([*within, record(10, 6.9)]).passed
    assert not check_ledger([*within, record(1000, 979)]).passed


def test_the_check_says_how_much() -> None:
    check = check_ledger([record(10, 9), record(10, 12), record(10, None), record(10, 0, "error")])
    assert (check.checked, check.missing, check.outside) == (2, 1, 0)
    assert check.max_ms == pytest.approx(-2)
    assert check.median_ms == pytest.approx(-0.5)
    assert not check.passed  # an answer without a ledger is no agreement


def test_nothing_to_check_is_no_pass() -> None:
    assert not check_ledger([]).passed
