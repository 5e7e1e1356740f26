"""Requests that belong together are let in together: places kept in the API process, honoured by the engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from headstart.config import SchedulerConfig
from headstart.core.request import FinishReason
from headstart.engine import AsyncEngine, EngineLimits, QueueFullError
from headstart.engine.process import EngineProcess
from tests.engine import scripted
from tests.engine.scripted import Script
from tests.engine.test_async_engine import collect, is_idle, make_request, until

Start = Callable[[Script, EngineLimits], AsyncEngine]
ONE_AT_A_TIME = SchedulerConfig(max_num_seqs=1, max_num_waiting=1)


@pytest.fixture
async def begin() -> AsyncIterator[Start]:
    made: list[AsyncEngine] = []

    def make(script: Script, limits: EngineLimits) -> AsyncEngine:
        command = [sys.executable, "-P", str(Path(scripted.__file__))]
        made.append(AsyncEngine(EngineProcess(command, msgspec.msgpack.encode(script)), limits))
        return made[-1]

    yield make
    await asyncio.gather(*(engine.shutdown(grace=0.5) for engine in made))


async def test_kept_places_are_nobody_elses(begin: Start) -> None:
    engine = begin(Script(scheduler=ONE_AT_A_TIME), EngineLimits(2, 1))
    await engine.wait_ready()
    with engine.reserve(2) as places:
        with pytest.raises(QueueFullError):
            await collect(engine, make_request("stranger"))
        with pytest.raises(QueueFullError):
            engine.reserve(1)
        for name in ("first", "second"):  # one after the other: the second's place was kept all the while
            outputs = [output async for output in engine.generate(make_request(name), places)]
            assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert (await collect(engine, make_request("stranger")))[-1].finish_reason is FinishReason.LENGTH


async def test_places_that_were_not_used_are_given_back(begin: Start) -> None:
    engine = begin(Script(), EngineLimits(2, 1))
    await engine.wait_ready()
    for _ in range(3):
        with engine.reserve(2):
            pass
    with pytest.raises(QueueFullError):
        engine.reserve(3)
    engine.reserve(2)


async def test_the_engine_takes_all_of_them_whatever_its_queue(begin: Start) -> None:
    """Its own count may stand at the limit when the later ones come: they were let in before."""
    engine = begin(Script(hold_context=8, scheduler=ONE_AT_A_TIME), EngineLimits(100, 1))
    await engine.wait_ready()
    with engine.reserve(5) as places:

        async def run(name: str, prompt: tuple[int, ...]) -> None:
            async for _ in engine.generate(make_request(name, prompt), places):
                pass

        tasks = [asyncio.create_task(run("holds", (1,) * 8))]
        await until(engine, lambda stats: stats.num_running == 1)
        tasks += [asyncio.create_task(run(f"waits{index}", (2,))) for index in range(4)]
        stats = await until(engine, lambda stats: stats.num_waiting == 4)
        assert not any(task.done() for task in tasks)
    with pytest.raises(QueueFullError) as caught:
        engine.reserve(2)
    assert (caught.value.num_waiting, caught.value.limit) == (stats.num_waiting, 1)
    for task in tasks:
        task.cancel()


async def test_one_that_leaves_gives_its_place_back(begin: Start) -> None:
    engine = begin(Script(hold_context=8), EngineLimits(1, 1))
    await engine.wait_ready()
    with engine.reserve(1) as places:
        stream = engine.generate(make_request("a"), places)
        await anext(stream)
        with pytest.raises(QueueFullError):
            engine.reserve(1)
        await stream.aclose()
    await until(engine, is_idle)
    engine.reserve(1)
