"""Steps with the clock: in order, those without work untimed, a failure passed on."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from headstart.core.cost import StepWork
from headstart.core.step import ModelOutput, SchedulerOutput
from headstart.executor.base import ExecutorInfo
from headstart.executor.timed import timed_steps


class Scripted:
    """An executor whose clock goes on by a step's id in seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.steps: list[int] = []

    def start(self) -> ExecutorInfo:
        raise AssertionError

    def submit(self, step: SchedulerOutput) -> Future[ModelOutput]:
        future: Future[ModelOutput] = Future()
        self.steps.append(step.step_id)
        self.now += step.step_id
        if step.step_id == 13:
            future.set_exception(RuntimeError("broken"))
        else:
            future.set_result(ModelOutput(step.step_id, ()))
        return future

    def shutdown(self) -> None:
        raise AssertionError


def step(number: int) -> SchedulerOutput:
    return SchedulerOutput(number, (), (), ())


def test_each_step_with_work_is_timed() -> None:
    executor = Scripted()
    works = {1: StepWork(num_decodes=1), 2: None, 3: StepWork(num_decodes=3)}
    found = list(timed_steps(executor, [(step(number), work) for number, work in works.items()], lambda: executor.now))
    assert found == [(StepWork(num_decodes=1), 1.0), (StepWork(num_decodes=3), 3.0)]
    assert executor.steps == [1, 2, 3]


def test_a_step_that_fails_ends_it() -> None:
    executor = Scripted()
    with pytest.raises(RuntimeError, match="broken"):
        list(timed_steps(executor, [(step(13), StepWork()), (step(1), None)], lambda: executor.now))
    assert executor.steps == [13]
