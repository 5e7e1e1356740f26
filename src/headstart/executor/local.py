"""LocalExecutor: one thread of this process runs a worker's steps in order. Owns that thread and its queue.

The worker's `start` runs in the same thread: compute libraries keep their thread pools by calling thread, and the pool
that was warmed up must be the one that serves. It must not know what a step means.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from headstart.core.step import ModelOutput, SchedulerOutput
from headstart.executor.base import ExecutorInfo


class StepWorker(Protocol):
    """What runs in the thread: `headstart.worker.Worker`, or a scripted one in tests."""

    def start(self, progress: Any) -> ExecutorInfo: ...

    def execute(self, step: SchedulerOutput) -> ModelOutput: ...


class ExecutorStoppedError(RuntimeError):
    """The step was not computed: the executor was shut down, or an earlier step failed."""


class LocalExecutor:
    """Implements `Executor`. `progress` is handed to the worker's `start`, which calls it in the executor's thread."""

    def __init__(self, worker: StepWorker, progress: Any = None) -> None:
        self._worker = worker
        self._progress = progress
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lost: BaseException | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headstart-executor", daemon=True)
        self._thread.start()

    def start(self) -> ExecutorInfo:
        """Load and warm up; returns when the worker can compute. Raises what the worker raised."""
        started: Future[ExecutorInfo] = Future()
        self._calls.put(partial(self._settle, started, partial(self._worker.start, self._progress)))
        return started.result()

    def submit(self, step: SchedulerOutput) -> Future[ModelOutput]:
        """Queue one step. After a failure every later step fails with `ExecutorStoppedError`."""
        future: Future[ModelOutput] = Future()
        if self._closed.is_set():
            future.set_exception(ExecutorStoppedError("the executor was shut down"))
            return future
        self._calls.put(partial(self._settle, future, partial(self._worker.execute, step)))
        return future

    def shutdown(self) -> None:
        """Stop after the step that runs now; steps still queued fail with `ExecutorStoppedError`."""
        self._closed.set()
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # a step may hold a long prompt: do not keep it while waiting for the next

    def _settle(self, future: Future[Any], compute: Callable[[], Any]) -> None:
        if self._closed.is_set() or self._lost is not None:
            stopped = ExecutorStoppedError(
                "the executor was shut down" if self._lost is None else "an earlier step failed"
            )
            stopped.__cause__ = self._lost
            future.set_exception(stopped)
            return
        try:
            result = compute()
        except BaseException as error:  # also SystemExit: the caller waits for this future
            self._lost = error
            future.set_exception(error)
        else:
            future.set_result(result)
