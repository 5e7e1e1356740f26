"""Threads for the work on texts that would hold the event loop up, and the bound on how much of it waits.

Owns who may still come in; knows neither what a text says nor what is done with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import ParamSpec, TypeVar

from headstart.server.errors import queue_full

P = ParamSpec("P")
T = TypeVar("T")
NUM_THREADS = 2
_WARM_UP_SECONDS = 10.0


class TextPool:
    """Texts that wait here and requests that wait in the engine (`num_queued()`) together are at most `max_waiting`."""

    def __init__(self, max_waiting: int, num_queued: Callable[[], int]) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="headstart-tokenize")
        self._max_waiting = max_waiting
        self._num_queued = num_queued
        self._num_inside = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(...)` in a thread. Raises `ApiError` 429 when as many requests wait as may."""
        num_waiting = max(0, self._num_inside - NUM_THREADS)
        if self._num_inside >= NUM_THREADS and num_waiting + self._num_queued() >= self._max_waiting:
            raise queue_full(num_waiting + self._num_queued(), self._max_waiting)
        self._num_inside += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
        finally:
            self._num_inside -= 1

    def warm_up(self, function: Callable[[], object]) -> None:
        """Run `function` once in every thread, so that the first request starts none. Blocks."""
        together = Barrier(NUM_THREADS)

        def once() -> None:
            together.wait(_WARM_UP_SECONDS)
            function()

        for done in [self._threads.submit(once) for _ in range(NUM_THREADS)]:
            done.result()
