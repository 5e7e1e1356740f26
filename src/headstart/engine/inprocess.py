"""InProcessEngine: a core and an executor driven by their caller's own thread, for offline use. No sockets, no loop.

It runs on the same `StepDriver` as the served engine. It must not know text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType

from headstart.core.engine_core import EngineCore
from headstart.core.errors import QueueFull
from headstart.core.request import EngineRequest
from headstart.core.stats import CoreStats
from headstart.core.step import RequestOutput
from headstart.engine.driver import KVSource, StepDriver
from headstart.executor.base import Executor


class InProcessEngine(AbstractContextManager["InProcessEngine"]):
    """Not thread-safe, and one `run` at a time. Takes over a started `executor` and ends it with `close`.

    `source`: where the core's loads come from. `on_end` is called once the executor has ended.
    """

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        *,
        source: KVSource | None = None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._core = core
        self._executor = executor
        self._clock = clock
        self._driver = StepDriver(core, executor, clock, source=source)
        self._on_end = on_end
        self._is_closed = False

    def run(self, requests: Iterable[EngineRequest]) -> Iterator[RequestOutput]:
        """Compute the requests together and yield their news as it comes. Closing the iterator aborts the rest.

        Any number may be given: what the queue does not hold yet waits here. Raises `RequestRefused` for one that can
        never run, and what a failed step raised.
        """
        if self._driver.is_lost:
            raise RuntimeError("a step failed in an earlier run, so this engine is lost; make a new one")
        upcoming = deque(requests)
        alive: set[str] = set()
        try:
            while upcoming or alive:
                self._admit(upcoming, alive)
                self._driver.fill()
                outputs = self._driver.take_outputs() or self._driver.retire(wait=True)
                if outputs is None:
                    self._driver.wait_for_kv()
                for output in outputs or ():
                    if output.finish_reason is not None:
                        alive.discard(output.request_id)
                    yield output
        finally:
            if not self._driver.is_lost:
                self._settle(alive)

    def abort(self, request_id: str) -> None:
        """End one request of a `run` in progress, which yields its last output next."""
        self._core.abort(request_id, self._clock())

    def stats(self) -> CoreStats:
        return self._core.stats()

    def close(self) -> None:
        """Safe to call twice."""
        self._executor.shutdown()
        if not self._is_closed:
            self._is_closed = True
            self._on_end()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _admit(self, upcoming: deque[EngineRequest], alive: set[str]) -> None:
        while upcoming:
            try:
                self._core.add_request(upcoming[0], self._clock())
            except QueueFull:
                return
            alive.add(upcoming.popleft().request_id)

    def _settle(self, alive: set[str]) -> None:
        """Abort what is alive, let steps in flight retire and the worker forget, so that every block is free again."""
        for request_id in alive:
            self._core.abort(request_id, self._clock())
        self._driver.take_outputs()
        while self._core.has_work:
            self._driver.fill()
            if self._driver.retire(wait=True) is None and self._core.has_work:
                self._driver.wait_for_kv()
