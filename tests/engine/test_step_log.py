"""The step log: a line for each step that computed; what cannot be written harms nobody."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from headstart.core.cost import StepWork
from headstart.core.events import RequestFinished, StepRetired
from headstart.engine.step_log import StepLog, read_step_log
from headstart.executor.base import StartupError


def retired(number: int, tokens: int = 1) -> StepRetired:
    work = StepWork(num_decodes=tokens, decode_context=7.0 * tokens, num_samples=tokens)
    return StepRetired(number, 1.0, 1.5, 0.001, tokens, (), work, 0.5, 0.25)


def test_steps_are_appended_and_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log = StepLog(path, clock=lambda: 1000.5)
    log.observe([RequestFinished("r", 1.0), retired(4), retired(5, tokens=0), retired(6, tokens=2)])
    log.observe([])
    first, second = read_step_log(path)
    assert (first.step, second.step) == (4, 6)
    assert (first.at, first.seconds, first.predicted_seconds, first.sample_seconds) == (1000.5, 0.5, 0.25, 0.001)
    assert second.work == StepWork(num_decodes=2, decode_context=14.0, num_samples=2)._asdict()
    log.close()
    log = StepLog(path)
    log.observe([retired(7)])
    log.close()
    log.observe([retired(8)])
    path.write_bytes(path.read_bytes() + b'{"at": 1, "st')  # the line that is being written
    assert [step.step for step in read_step_log(path)] == [4, 6, 7]


def test_a_place_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"the step log .*none/steps cannot be written: No such file"):
        StepLog(tmp_path / "none" / "steps")


def test_a_full_disk_ends_the_log_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    log = StepLog(full)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            log.observe([retired(number)])
    assert caplog.text.count("the step log /dev/full ends here: No space left on device") == 1
