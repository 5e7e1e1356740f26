"""EngineLoop: the real loop, core, executor and channel in threads of this process, with a scripted model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from headstart.config import SchedulerConfig
from headstart.core.request import EngineRequest, FinishReason, SamplingParams
from headstart.core.step import RequestOutput
from headstart.engine.ipc import (
    Abort,
    Add,
    Channel,
    FromEngine,
    IPCError,
    Outputs,
    Ping,
    Pong,
    Refused,
    Shutdown,
    SocketDirectory,
    ToEngine,
    api_codec,
    engine_codec,
)
from headstart.engine.loop import EngineLoop
from headstart.executor.local import LocalExecutor
from tests.engine.scripted import CRASH_TOKEN, ERROR_TOKEN, CountingWorker, Script, expected_tokens

DEADLINE = 20.0


def make_request(request_id: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4) -> EngineRequest:
    return EngineRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens), arrival_time=time.monotonic())


class Served:
    """A loop that runs in a thread, and the API process' end of its channel."""

    def __init__(self, script: Script, *, gated: bool = False) -> None:
        self.worker = CountingWorker(script, gate=threading.Semaphore(0) if gated else None)
        self.directory = SocketDirectory()
        self.channel: Channel[ToEngine, FromEngine] = Channel(api_codec(), self.directory.address, bind=True)
        self._engine_channel = Channel(engine_codec(), self.directory.address, bind=False)
        self.executor = LocalExecutor(self.worker)
        self.core = script.make_core()
        loop = EngineLoop(self.core, self.executor, self._engine_channel, time.monotonic)
        self.threads = ThreadPoolExecutor(1)
        self.result = self.threads.submit(loop.run)
        self.received: list[FromEngine] = []
        self.until(lambda: bool(self.received))  # the first statistics: it is connected

    def until(self, condition: Callable[[], bool]) -> None:
        """Receive until `condition` holds."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline, f"not within {DEADLINE} s; received {self.received}"
            self.channel.wait(0.05)
            while (message := self.channel.receive()) is not None:
                self.received.append(message)

    def outputs(self, request_id: str) -> list[RequestOutput]:
        batches = [message.outputs for message in self.received if isinstance(message, Outputs)]
        return [output for batch in batches for output in batch if output.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs(request_id) for token in output.token_ids]

    def finished(self, *request_ids: str) -> bool:
        return all(
            (outputs := self.outputs(request_id)) and outputs[-1].finish_reason is not None
            for request_id in request_ids
        )

    def ping(self) -> Pong:
        """Returns when everything sent before has been handled."""
        number = len(self.received) + 1000
        self.channel.send(Ping(number))
        self.until(lambda: any(isinstance(message, Pong) and message.number == number for message in self.received))
        return next(message for message in reversed(self.received) if isinstance(message, Pong))

    def let_steps_run(self, count: int = 1) -> None:
        assert self.worker.gate is not None
        self.worker.gate.release(count)

    def step_entered(self) -> None:
        assert self.worker.entered.acquire(timeout=DEADLINE)

    def close(self) -> None:
        if self.worker.gate is not None:
            self.let_steps_run(10_000)
        if not self.result.done():
            self.channel.send(Shutdown())
        self.threads.shutdown()
        self.executor.shutdown()
        self.channel.close(0)
        self._engine_channel.close(0)
        self.directory.remove()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(script: Script | None = None, *, gated: bool = False) -> Served:
        made.append(Served(script or Script(), gated=gated))
        return made[-1]

    yield make
    for served in made:
        served.close()


def test_a_request_is_answered_token_by_token(serve: Callable[..., Served]) -> None:
    served = serve()
    served.channel.send(Add(make_request("a", (5, 6, 7), max_tokens=6)))
    served.until(lambda: served.finished("a"))
    outputs = served.outputs("a")
    assert served.tokens("a") == expected_tokens((5, 6, 7), 6)
    assert len(outputs) == 6
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert all(first.time <= second.time for first, second in pairwise(outputs))


def test_only_the_first_token_carries_the_ledger_and_it_sums_to_the_wait(serve: Callable[..., Served]) -> None:
    served = serve()
    request = make_request("a")
    served.channel.send(Add(request))
    served.until(lambda: served.finished("a"))
    first, *later = served.outputs("a")
    assert sum(seconds for _, seconds in first.ledger) == pytest.approx(first.time - request.arrival_time, abs=1e-6)
    assert not any(output.ledger for output in later)


def test_one_step_is_one_message_whatever_its_requests(serve: Callable[..., Served]) -> None:
    served = serve(gated=True)
    served.channel.send(Add(make_request("first", max_tokens=8)))
    served.step_entered()
    for name in "abcde":
        served.channel.send(Add(make_request(name, max_tokens=3)))
    served.ping()
    served.let_steps_run(100)
    served.until(lambda: served.finished("first", *"abcde"))
    batches = [message.outputs for message in served.received if isinstance(message, Outputs) and message.outputs]
    assert max(len(batch) for batch in batches) == 6
    assert all(len({output.request_id for output in batch}) == len(batch) for batch in batches)


def test_a_request_that_arrives_during_a_step_is_in_the_next_one(serve: Callable[..., Served]) -> None:
    served = serve(gated=True)
    served.channel.send(Add(make_request("a")))
    served.step_entered()
    served.channel.send(Add(make_request("b")))
    served.ping()  # it is taken in while the step computes
    served.let_steps_run()
    served.step_entered()
    assert {chunk.request_id for chunk in served.worker.steps[1].chunks} == {"a", "b"}


@pytest.mark.parametrize("depth", [1, 2])
def test_as_many_steps_as_configured_are_in_flight(serve: Callable[..., Served], depth: int) -> None:
    served = serve(Script(scheduler=SchedulerConfig(pipeline_depth=depth)), gated=True)
    served.channel.send(Add(make_request("a", max_tokens=9)))
    served.step_entered()
    served.ping()
    assert served.core.num_in_flight == depth
    served.let_steps_run(100)
    served.until(lambda: served.finished("a"))
    assert served.tokens("a") == expected_tokens((1, 2, 3), 9)


def test_pings_are_answered_while_a_step_computes(serve: Callable[..., Served]) -> None:
    served = serve(gated=True)
    served.channel.send(Add(make_request("a")))
    served.step_entered()
    assert served.ping().stats.num_running == 1
    assert not served.outputs("a")


def test_an_abort_while_its_step_computes_is_answered_at_once_and_frees_all(serve: Callable[..., Served]) -> None:
    served = serve(gated=True)
    served.channel.send(Add(make_request("a")))
    served.step_entered()
    served.channel.send(Abort(("a", "never heard of it")))
    served.until(lambda: served.finished("a"))
    assert served.outputs("a")[-1].finish_reason is FinishReason.ABORT
    served.let_steps_run(10)
    served.channel.send(Add(make_request("b", (9,))))
    served.until(lambda: served.finished("b"))
    stats = served.ping().stats
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)


def test_statistics_come_without_being_asked_for(serve: Callable[..., Served]) -> None:
    served = serve()
    served.channel.send(Add(make_request("a")))

    def idle_again() -> bool:
        last = served.received[-1]
        return isinstance(last, Outputs) and last.stats.finished == 1 and last.stats.num_running == 0

    served.until(idle_again)
    reports = [message.stats for message in served.received if isinstance(message, Outputs)]
    assert not any(isinstance(message, Pong) for message in served.received)
    assert [stats.finished for stats in reports] == sorted(stats.finished for stats in reports)
    assert max(stats.num_running for stats in reports) == 1
    assert reports[-1].num_free_blocks == reports[-1].num_blocks


def test_a_refused_request_is_told_why_and_others_go_on(serve: Callable[..., Served]) -> None:
    served = serve(Script(scheduler=SchedulerConfig(max_num_waiting=2, max_num_seqs=1)), gated=True)
    served.channel.send(Add(make_request("a")))
    served.step_entered()
    for name in ("b", "c", "too many"):
        served.channel.send(Add(make_request(name)))
    served.channel.send(Add(make_request("too long", tuple(range(500)))))
    served.channel.send(Add(make_request("empty", ())))
    served.ping()
    refused = {message.request_id: message for message in served.received if isinstance(message, Refused)}
    assert set(refused) == {"too many", "too long", "empty"}
    assert refused["too many"].queue_full == (2, 2)
    assert refused["too long"].queue_full is None
    assert "500" in refused["too long"].message
    assert "200" in refused["too long"].message
    served.let_steps_run(100)
    served.until(lambda: served.finished("a", "b", "c"))


def test_a_request_that_cannot_be_computed_ends_alone(serve: Callable[..., Served]) -> None:
    served = serve()
    served.channel.send(Add(make_request("bad", (ERROR_TOKEN,))))
    served.channel.send(Add(make_request("good")))
    served.until(lambda: served.finished("bad", "good"))
    assert served.outputs("bad")[-1].finish_reason is FinishReason.ERROR
    assert "finite" in (served.outputs("bad")[-1].error or "")
    assert served.tokens("good") == expected_tokens((1, 2, 3), 4)


def test_a_failed_step_ends_the_loop_with_its_exception(serve: Callable[..., Served]) -> None:
    served = serve()
    served.channel.send(Add(make_request("a", (CRASH_TOKEN,))))
    with pytest.raises(RuntimeError, match="the model broke"):
        served.result.result(DEADLINE)


def test_bytes_that_are_no_message_end_the_loop(serve: Callable[..., Served]) -> None:
    served = serve()
    served.channel._socket.send(b"\xc1 not msgpack")
    with pytest.raises(IPCError):
        served.result.result(DEADLINE)


def test_shutdown_does_not_wait_for_requests(serve: Callable[..., Served]) -> None:
    served = serve(gated=True)
    served.channel.send(Add(make_request("a", max_tokens=100)))
    served.step_entered()
    served.channel.send(Shutdown())
    assert served.result.result(DEADLINE) is None


def test_an_idle_loop_uses_no_cpu(serve: Callable[..., Served]) -> None:
    served = serve()
    served.channel.send(Add(make_request("a")))
    served.until(lambda: served.finished("a"))
    served.ping()
    before = time.process_time()
    served.channel.wait(0.5)
    assert time.process_time() - before < 0.1
