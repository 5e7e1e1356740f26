"""What the engine process does between loading and serving."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

from headstart.engine import child
from headstart.engine.child import BuiltEngine
from headstart.engine.ipc import FromEngine, Ready, Shutdown, ToEngine
from headstart.executor.local import LocalExecutor
from tests.engine.scripted import CountingWorker, Script


class ParentThatStopsAtOnce:
    """The channel's other end: notes how much the collector is kept from when `Ready` is said, then says `Shutdown`."""

    def __init__(self) -> None:
        self.frozen_at_ready: int | None = None

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Ready):
            self.frozen_at_ready = gc.get_freeze_count()

    def receive(self) -> ToEngine:
        return Shutdown()

    def wake(self) -> None: ...


@pytest.fixture
def own_collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("own_collector")
def test_what_was_loaded_is_out_of_the_collectors_sight_when_the_engine_is_ready() -> None:
    script, parent = Script(), ParentThatStopsAtOnce()
    executor = LocalExecutor(CountingWorker(script))
    executor.start()
    built = BuiltEngine(script.make_core(), executor, script.make_info())
    assert child._serve(parent, lambda payload, progress: built, b"", time.monotonic) is None  # type: ignore[arg-type]
    assert parent.frozen_at_ready is not None
    assert parent.frozen_at_ready > 10_000
