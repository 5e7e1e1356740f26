"""AsyncEngine against real engine processes that run the scripted model: streams, refusals, aborts, death."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from headstart.config import SchedulerConfig
from headstart.core.request import EngineRequest, FinishReason, SamplingParams
from headstart.core.stats import CoreStats
from headstart.core.step import RequestOutput
from headstart.engine import (
    AsyncEngine,
    EngineDeadError,
    EngineLimits,
    EngineState,
    QueueFullError,
    RequestRefused,
    RequestTooLong,
)
from headstart.engine.process import EngineProcess
from headstart.executor.base import StartupError
from tests.engine import scripted
from tests.engine.scripted import CRASH_TOKEN, ERROR_TOKEN, EXIT_TOKEN, Script, expected_tokens

DEADLINE = 20.0
LIMITS = EngineLimits(max_num_requests=1000, max_num_waiting=900)

Start = Callable[..., AsyncEngine]


def make_request(
    request_id: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4, seed: int = 0
) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=seed)
    return EngineRequest(request_id, prompt, params, arrival_time=time.monotonic())


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    made: list[AsyncEngine] = []

    def make(script: Script | None = None, limits: EngineLimits = LIMITS, progress: object = None) -> AsyncEngine:
        command = [sys.executable, "-P", str(Path(scripted.__file__))]
        process = EngineProcess(command, msgspec.msgpack.encode(script or Script()))
        made.append(AsyncEngine(process, limits, progress))  # type: ignore[arg-type]
        return made[-1]

    yield make
    await asyncio.gather(*(engine.shutdown(grace=0.5) for engine in made))


async def collect(engine: AsyncEngine, request: EngineRequest) -> list[RequestOutput]:
    return [output async for output in engine.generate(request)]


async def num_tokens(engine: AsyncEngine, request: EngineRequest) -> int:
    """Tokens, not outputs: a reader that is late finds several in one output."""
    return sum(len(output.token_ids) for output in await collect(engine, request))


async def until(engine: AsyncEngine, condition: Callable[[CoreStats], bool]) -> CoreStats:
    """Ask for the statistics until `condition` holds."""
    deadline = time.monotonic() + DEADLINE
    while not condition(stats := await engine.ping()):
        assert time.monotonic() < deadline, f"not within {DEADLINE} s: {stats}"
    return stats


def is_idle(stats: CoreStats) -> bool:
    return (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)


async def within(seconds: float, awaitable: Awaitable[object]) -> object:
    return await asyncio.wait_for(awaitable, seconds)


async def test_it_starts_reports_progress_and_says_what_it_can_do(start: Start) -> None:
    told: list[tuple[object, ...]] = []
    engine = start(progress=lambda *args: told.append(args))
    assert engine.state is EngineState.STARTING
    assert engine.stats() is None
    with pytest.raises(RuntimeError, match="not ready"):
        _ = engine.info
    await engine.wait_ready()
    assert engine.state is EngineState.READY
    assert (engine.info.max_model_len, engine.info.num_kv_tokens, engine.info.summary) == (200, 256, "scripted")
    assert told[-1] == ("load", 2, 2)
    stats = engine.stats()
    assert stats is not None
    assert stats.num_blocks == 64


async def test_a_stream_yields_every_token_and_the_ledger(start: Start) -> None:
    engine = start()
    request = make_request("a", (4, 5), max_tokens=20)
    outputs = await collect(engine, request)  # generate waits until the engine is ready
    assert [token for output in outputs for token in output.token_ids] == expected_tokens((4, 5), 20)
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert {part for part, _ in outputs[0].ledger} >= {"admit", "queue", "prefill"}
    assert is_idle(await engine.ping())


async def test_64_streams_at_once(start: Start) -> None:
    engine = start(Script(num_blocks=512))
    requests = [make_request(f"r{index}", (index, index), 1 + index % 7) for index in range(64)]
    results = await asyncio.gather(*(collect(engine, request) for request in requests))
    for request, outputs in zip(requests, results, strict=True):
        tokens = [token for output in outputs for token in output.token_ids]
        assert tokens == expected_tokens(request.prompt_token_ids, request.params.max_tokens)
    assert is_idle(await engine.ping())


async def test_closing_a_stream_while_decoding_frees_everything(start: Start) -> None:
    engine = start(Script(step_seconds=0.002))
    async with aclosing(engine.generate(make_request("a", max_tokens=150))) as stream:
        await anext(stream)
    stats = await until(engine, is_idle)
    assert stats.aborts == 1
    assert stats.generated_tokens < 150


async def test_leaving_the_queue_and_a_prefill_frees_everything(start: Start) -> None:
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=2)
    engine = start(Script(step_seconds=0.005, scheduler=config))
    prefilling = asyncio.create_task(collect(engine, make_request("prefill", tuple(range(190)))))
    await until(engine, lambda stats: stats.num_running == 1)
    queued = asyncio.create_task(collect(engine, make_request("queued", (9,))))
    await until(engine, lambda stats: stats.num_waiting == 1)
    for task in (queued, prefilling):
        task.cancel()
    await asyncio.gather(queued, prefilling, return_exceptions=True)
    stats = await until(engine, is_idle)
    assert stats.aborts == 2
    assert stats.generated_tokens == 0
    assert (await collect(engine, make_request("next")))[-1].finish_reason is FinishReason.LENGTH


async def test_a_slow_reader_gets_few_large_outputs(start: Start) -> None:
    engine = start()
    async with aclosing(engine.generate(make_request("slow", max_tokens=180))) as stream:
        tokens = list((await anext(stream)).token_ids)
        await until(engine, is_idle)  # everything was computed meanwhile
        rest = [output async for output in stream]
    assert len(rest) == 1
    assert tokens + list(rest[0].token_ids) == expected_tokens((1, 2, 3), 180)


async def test_a_request_that_is_too_long_is_refused_before_it_is_sent(start: Start) -> None:
    engine = start()
    with pytest.raises(RequestTooLong, match=r"200 tokens.*holds 200"):
        await collect(engine, make_request("a", tuple(range(200))))
    assert (await engine.ping()).finished == 0
    outputs = await collect(engine, make_request("fits", tuple(range(199)), max_tokens=50))
    assert outputs[-1].num_output_tokens == 1


async def test_what_the_engine_refuses_reaches_its_stream_alone(start: Start) -> None:
    engine = start()
    with pytest.raises(RequestRefused, match="no tokens"):
        await collect(engine, make_request("empty", ()))
    with pytest.raises(RequestRefused, match="cannot send"):
        await collect(engine, make_request("wide", (1 << 80,)))
    outputs = await collect(engine, make_request("bad", (ERROR_TOKEN,)))
    assert (outputs[-1].finish_reason, outputs[-1].error) == (FinishReason.ERROR, "the logits are not finite")
    assert await num_tokens(engine, make_request("good")) == 4


async def test_an_id_in_use_is_refused(start: Start) -> None:
    engine = start(Script(step_seconds=0.002))
    async with aclosing(engine.generate(make_request("a", max_tokens=150))) as stream:
        await anext(stream)
        with pytest.raises(RequestRefused, match="'a' is in use"):
            await collect(engine, make_request("a"))
        assert (await anext(stream)).token_ids


async def test_a_full_queue_refuses_with_its_numbers(start: Start) -> None:
    config = SchedulerConfig(max_num_seqs=1, max_num_waiting=2)
    engine = start(Script(hold_context=8, scheduler=config), EngineLimits(100, 2))
    first = asyncio.create_task(collect(engine, make_request("first", (1,) * 8)))
    await until(engine, lambda stats: stats.num_running == 1)
    others = [asyncio.create_task(collect(engine, make_request(f"other{index}"))) for index in range(2)]
    await until(engine, lambda stats: stats.num_waiting == 2)
    with pytest.raises(QueueFullError) as caught:
        await collect(engine, make_request("one too many"))
    assert (caught.value.num_waiting, caught.value.limit) == (2, 2)
    for task in (first, *others):
        task.cancel()


async def test_more_live_requests_than_the_limit_are_refused_without_asking_the_engine(start: Start) -> None:
    engine = start(Script(hold_context=8), EngineLimits(max_num_requests=1, max_num_waiting=7))
    first = asyncio.create_task(collect(engine, make_request("first", (1,) * 8)))
    await until(engine, lambda stats: stats.num_running == 1)
    with pytest.raises(QueueFullError) as caught:
        await collect(engine, make_request("second"))
    assert caught.value.limit == 7
    first.cancel()


async def assert_dead(engine: AsyncEngine, streams: list[asyncio.Task[list[RequestOutput]]], match: str) -> None:
    """Every stream ends at once, and nothing new hangs."""
    for stream in streams:
        with pytest.raises(EngineDeadError, match=match):
            await within(1.0, stream)
    assert engine.state is EngineState.DEAD
    with pytest.raises(EngineDeadError, match=match):
        await within(1.0, collect(engine, make_request("new")))
    for waits in (engine.ping, engine.wait_ready):
        with pytest.raises(EngineDeadError, match=match):
            await within(1.0, waits())
    await within(DEADLINE, engine.shutdown())
    assert engine._process.wait(0) is not None


async def open_streams(engine: AsyncEngine) -> list[asyncio.Task[list[RequestOutput]]]:
    """Streams that wait: their one step never ends (the script holds at context 8)."""
    streams = [asyncio.create_task(collect(engine, make_request(f"open{index}", (1,) * 8))) for index in range(5)]
    await until(engine, lambda stats: stats.num_running >= 1)
    return streams


async def test_a_killed_engine_ends_every_stream_at_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(Script(hold_context=8))
    streams = await open_streams(engine)
    os.kill(engine.pid, signal.SIGKILL)
    await assert_dead(engine, streams, "killed by SIGKILL")
    assert [record.levelname for record in caplog.records if "killed by SIGKILL" in record.message] == ["ERROR"]


async def test_a_frozen_engine_is_noticed_and_killed(start: Start) -> None:
    limits = EngineLimits(1000, 900, heartbeat_timeout=0.4)
    engine = start(Script(hold_context=8), limits)
    streams = await open_streams(engine)
    os.kill(engine.pid, signal.SIGSTOP)
    for stream in streams:
        with pytest.raises(EngineDeadError, match=r"not answered for 0.4 s"):
            await within(DEADLINE, stream)
    await assert_dead(engine, [], "not answered")


async def test_a_long_step_is_no_death(start: Start) -> None:
    engine = start(Script(step_seconds=1.0), EngineLimits(1000, 900, heartbeat_timeout=0.4))
    assert await num_tokens(engine, make_request("a", max_tokens=1)) == 1
    assert engine.state is EngineState.READY


async def test_a_step_that_never_ends_is_the_end_of_the_engine(start: Start) -> None:
    engine = start(Script(hold_context=8, scheduler=SchedulerConfig(step_timeout_s=2.0)))
    streams = await open_streams(engine)
    await asyncio.wait(streams, timeout=DEADLINE)
    await assert_dead(engine, streams, r"a step has been computing for \d s")


async def test_a_stall_of_this_process_is_no_death_of_the_engine(start: Start) -> None:
    engine = start(limits=EngineLimits(1000, 900, heartbeat_timeout=0.4))
    await engine.wait_ready()
    time.sleep(1.0)  # this event loop itself stands still, which is what is tested
    assert await num_tokens(engine, make_request("a")) == 4


async def test_a_failed_step_is_the_end_and_says_what_failed(start: Start) -> None:
    engine = start()
    streams = [asyncio.create_task(collect(engine, make_request("a", (CRASH_TOKEN,))))]
    await asyncio.wait(streams, timeout=DEADLINE)
    await assert_dead(engine, streams, "RuntimeError: the model broke")


async def test_an_engine_that_exits_without_a_word_is_noticed(start: Start) -> None:
    engine = start()
    streams = [asyncio.create_task(collect(engine, make_request("a", (EXIT_TOKEN,))))]
    await asyncio.wait(streams, timeout=DEADLINE)
    await assert_dead(engine, streams, "exited with code 3")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (Script(startup_error="model.bin is damaged; download it again"), "model.bin is damaged; download it again"),
        (Script(startup_crash=True), "the engine could not start: ZeroDivisionError: a bug in loading"),
    ],
)
async def test_an_engine_that_cannot_start_says_why_in_one_line(start: Start, script: Script, message: str) -> None:
    engine = start(script)
    with pytest.raises(StartupError) as caught:
        await within(DEADLINE, engine.wait_ready())
    assert str(caught.value) == message
    with pytest.raises(EngineDeadError):
        await collect(engine, make_request("a"))


async def test_a_program_that_is_no_engine_is_a_failed_start() -> None:
    engine = AsyncEngine(EngineProcess([sys.executable, "-c", "raise SystemExit(7)"], b""), LIMITS)
    with pytest.raises(StartupError, match="exited with code 7 while it was starting"):
        await within(DEADLINE, engine.wait_ready())
    await engine.shutdown()


async def test_shutdown_ends_streams_and_the_process_in_order(start: Start) -> None:
    engine = start(Script(step_seconds=0.002))
    stream = asyncio.create_task(collect(engine, make_request("a", max_tokens=190)))
    await until(engine, lambda stats: stats.num_running == 1)
    directory = engine._process._directory.path
    await engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await stream
    assert engine._process.wait(0) == 0
    assert not os.path.exists(directory)
    await engine.shutdown()


async def test_shutdown_while_starting_does_not_wait(start: Start) -> None:
    engine = start()
    await within(DEADLINE, engine.shutdown())
    with pytest.raises(StartupError, match="shut down"):
        await engine.wait_ready()


async def test_the_engine_ignores_the_terminals_and_the_service_managers_signals(start: Start) -> None:
    engine = start()
    await engine.wait_ready()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(engine.pid, number)
    assert await num_tokens(engine, make_request("a")) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd and the parent death signal are Linux's")
@pytest.mark.parametrize("frozen", [False, True])
def test_the_engine_dies_with_its_parent(frozen: bool) -> None:
    """Also when it is stopped. The parent is a process of its own that is killed."""
    script_path = Path(scripted.__file__)
    code = f"""
import asyncio, sys, msgspec
sys.path[:0] = [{str(script_path.parents[2])!r}, {str(script_path.parents[2] / "src")!r}]
from tests.engine.scripted import Script
from headstart.engine import AsyncEngine, EngineLimits
from headstart.engine.process import EngineProcess
async def main():
    process = EngineProcess([sys.executable, "-P", {str(script_path)!r}], msgspec.msgpack.encode(Script()))
    engine = AsyncEngine(process, EngineLimits(10, 10))
    await engine.wait_ready()
    print(engine.pid, process._directory.path, flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()
        child = os.pidfd_open(int(pid))
        if frozen:
            os.kill(int(pid), signal.SIGSTOP)
        parent.kill()
    ended, _, _ = select.select([child], [], [], DEADLINE)
    os.close(child)
    assert ended, "the engine process lives on"
    assert not os.path.exists(directory)
