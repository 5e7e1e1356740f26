"""LocalExecutor: order, one thread, failure, shutdown."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from headstart.core.step import ModelOutput, SchedulerOutput
from headstart.executor.base import ExecutorInfo, StartupError
from headstart.executor.local import ExecutorStoppedError, LocalExecutor

INFO = ExecutorInfo(num_blocks=4, block_size=2, max_model_len=8, vocab_size=10, summary="recording")


def step(step_id: int) -> SchedulerOutput:
    return SchedulerOutput(step_id, (), (), ("r",))


class RecordingWorker:
    """Notes the thread of each call; `on_execute` is what a step does."""

    def __init__(self, on_execute: Callable[[SchedulerOutput], None] = lambda step: None) -> None:
        self.on_execute = on_execute
        self.threads: list[int] = []
        self.step_ids: list[int] = []

    def start(self, progress: object) -> ExecutorInfo:
        self.threads.append(threading.get_ident())
        if callable(progress):
            progress("load", 1, 1)
        return INFO

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        self.threads.append(threading.get_ident())
        self.step_ids.append(step.step_id)
        self.on_execute(step)
        return ModelOutput(step.step_id, ())


@pytest.fixture
def make_executor() -> Iterator[Callable[..., LocalExecutor]]:
    made: list[LocalExecutor] = []

    def make(*args: object, **kwargs: object) -> LocalExecutor:
        made.append(LocalExecutor(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for executor in made:
        executor.shutdown()


def test_starts_and_runs_steps_in_order_in_one_thread(make_executor: Callable[..., LocalExecutor]) -> None:
    worker = RecordingWorker()
    told: list[tuple[object, ...]] = []
    executor = make_executor(worker, lambda *args: told.append(args))
    assert executor.start() == INFO
    futures = [executor.submit(step(index)) for index in range(50)]
    assert [future.result(10).step_id for future in futures] == list(range(50))
    assert worker.step_ids == list(range(50))
    assert len(set(worker.threads)) == 1
    assert worker.threads[0] != threading.get_ident()
    assert told == [("load", 1, 1)]


def test_submit_does_not_wait_for_the_step(make_executor: Callable[..., LocalExecutor]) -> None:
    gate = threading.Event()
    executor = make_executor(RecordingWorker(lambda _: gate.wait() and None))
    futures = [executor.submit(step(0)), executor.submit(step(1))]
    assert not any(future.done() for future in futures)
    gate.set()
    assert [future.result(10).step_id for future in futures] == [0, 1]


def test_what_start_raises_reaches_the_caller(make_executor: Callable[..., LocalExecutor]) -> None:
    class Broken(RecordingWorker):
        def start(self, progress: object) -> ExecutorInfo:
            raise StartupError("the file is damaged")

    executor = make_executor(Broken())
    with pytest.raises(StartupError, match="the file is damaged"):
        executor.start()
    with pytest.raises(ExecutorStoppedError, match="earlier"):
        executor.submit(step(0)).result(10)


def test_after_a_failed_step_no_other_step_runs(make_executor: Callable[..., LocalExecutor]) -> None:
    gate = threading.Event()

    def fail(step: SchedulerOutput) -> None:
        gate.wait()
        if step.step_id == 1:
            raise ZeroDivisionError("broken kernel")

    worker = RecordingWorker(fail)
    executor = make_executor(worker)
    futures = [executor.submit(step(index)) for index in range(3)]
    gate.set()
    assert futures[0].result(10).step_id == 0
    with pytest.raises(ZeroDivisionError, match="broken kernel"):
        futures[1].result(10)
    with pytest.raises(ExecutorStoppedError) as caught:
        futures[2].result(10)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert worker.step_ids == [0, 1]


def test_shutdown_finishes_the_running_step_and_fails_the_queued(make_executor: Callable[..., LocalExecutor]) -> None:
    gate, entered = threading.Event(), threading.Event()

    def hold(_: SchedulerOutput) -> None:
        entered.set()
        gate.wait()

    executor = make_executor(RecordingWorker(hold))
    running, queued = executor.submit(step(0)), executor.submit(step(1))
    assert entered.wait(10)
    stopper = threading.Thread(target=executor.shutdown)
    stopper.start()
    while not executor.submit(step(2)).done():  # shutdown has begun once it refuses
        pass
    gate.set()
    stopper.join(10)
    assert not stopper.is_alive()
    assert running.result(0).step_id == 0
    with pytest.raises(ExecutorStoppedError, match="shut down"):
        queued.result(0)
    executor.shutdown()  # twice is fine
