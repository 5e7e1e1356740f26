"""Arrivals follow the schedule and nothing else, on a clock that only moves when it is slept on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from headstart.bench.http import Sink, TransferError
from headstart.bench.record import RequestRecord
from headstart.bench.session import RequestPlan, Session, SessionLimits
from headstart.bench.workloads import send_open_loop

TOKEN = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'


class VirtualClock:
    """Time moves to the moment that is slept until, after everything that can run has run."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    async def sleep_until(self, when: float) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        self.time = max(self.time, when)


class HeldServer:
    """An exchanger whose answers come when the test says so."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.sent_at: list[float] = []
        self.release = asyncio.Event()
        self.error: TransferError | None = None

    async def exchange(self, request: bytes, sink: Sink, *, on_connect: Callable[[float], None] | None = None) -> None:
        self.sent_at.append(self.clock.now())
        sink.on_sent(self.clock.now())
        await self.release.wait()
        if self.error is not None:
            raise self.error
        sink.on_head(200, {"content-type": "text/event-stream"}, self.clock.now())
        sink.on_body(TOKEN, self.clock.now())


def make(clock: VirtualClock, server: HeldServer, **limits: float) -> Session:
    settled = SessionLimits(timeout=limits.get("timeout", 600.0), max_in_flight=int(limits.get("max_in_flight", 100)))
    return Session(server, target="server", round_index=0, limits=settled, clock=clock)


PLAN = RequestPlan("g", b"")


async def test_arrivals_never_wait_for_answers() -> None:
    clock = VirtualClock()
    server = HeldServer(clock)
    session = make(clock, server)
    offsets = [0.0, 0.5, 0.5, 3.0, 60.0]
    running = asyncio.ensure_future(send_open_loop(session, [(offset, PLAN) for offset in offsets]))
    while len(server.sent_at) < len(offsets):
        await asyncio.sleep(0)
    assert [when - 1000.0 for when in server.sent_at] == offsets  # nothing has been answered yet
    assert session.records == []
    clock.time += 10
    server.release.set()
    await running
    assert [record.ttft_ms for record in session.records] == [70_000, 69_500, 69_500, 67_000, 10_000]
    assert [record.late_ms for record in session.records] == [0] * 5


async def test_a_schedule_that_is_behind_catches_up_and_says_how_late_it_was() -> None:
    clock = VirtualClock()
    server = HeldServer(clock)
    server.release.set()
    session = make(clock, server)
    clock.time += 2
    await send_open_loop(session, [(0.5, PLAN), (5.0, PLAN)])
    assert [record.late_ms for record in session.records] == [1500, 0]


async def test_more_requests_in_flight_than_allowed_are_counted_as_errors() -> None:
    clock = VirtualClock()
    server = HeldServer(clock)
    session = make(clock, server, max_in_flight=2)
    running = asyncio.ensure_future(send_open_loop(session, [(float(i), PLAN) for i in range(4)]))
    while len(session.records) < 2:
        await asyncio.sleep(0)
    server.release.set()
    await running
    assert [record.status for record in session.records] == ["error", "error", "ok", "ok"]
    assert "in flight" in (session.records[0].error or "")


async def test_a_broken_exchange_is_an_error_record() -> None:
    clock = VirtualClock()
    server = HeldServer(clock)
    server.error = TransferError("it broke")
    server.release.set()
    record = await make(clock, server).send(PLAN)
    assert (record.status, record.error, record.answered) == ("error", "it broke", False)


async def test_a_request_that_takes_too_long_is_a_timeout() -> None:
    clock = VirtualClock()
    record = await make(clock, HeldServer(clock), timeout=1e-6).send(PLAN)
    assert record.status == "timeout"
    assert record.failed


async def test_stopping_on_purpose_is_no_error_and_interrupting_says_so() -> None:
    clock = VirtualClock()
    server = HeldServer(clock)
    session = make(clock, server)
    stopped, interrupted = session.start(PLAN), session.start(PLAN)
    record = await stopped.stop()
    assert (record.status, record.failed) == ("stopped", False)
    await session.interrupt()
    assert (await interrupted.record()).status == "interrupted"
    assert interrupted.done()


async def test_answering_tells_a_first_token_from_an_end_without_one() -> None:
    clock = VirtualClock()
    server = HeldServer(clock)
    session = make(clock, server)
    good = session.start(PLAN)
    server.release.set()
    assert await good.answering()
    server.error = TransferError("no")
    assert not await session.start(PLAN).answering()
    await session.drain()


async def test_every_end_is_reported_once() -> None:
    clock = VirtualClock()
    server = HeldServer(clock)
    server.release.set()
    seen: list[RequestRecord] = []
    session = Session(server, target="t", round_index=3, limits=SessionLimits(), clock=clock, on_end=seen.append)
    await session.send(PLAN)
    await session.send(PLAN)
    assert seen == session.records
    assert [(record.target, record.round, record.index) for record in seen] == [("t", 3, 0), ("t", 3, 1)]


@pytest.mark.parametrize("offset", [0.0, -5.0])
async def test_sleeping_until_the_past_returns(offset: float) -> None:
    clock = VirtualClock()
    await make(clock, HeldServer(clock)).sleep_until(offset)
    assert clock.time == 1000.0
