"""The process behind `headstart calibrate` (`python -m headstart.calibrate SECONDS`): loads a model, runs steps of it.

Reads what to load from stdin, as an engine process is told it; writes one JSON message a line on stdout (see
`headstart.perf.calibration`). Imports torch.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime

import msgspec

import headstart
from headstart.config import ConfigError
from headstart.executor.base import StartupError
from headstart.launch import EngineSetup, decode_setup, settle_config
from headstart.perf.calibration import (
    HELD_OUT_EVERY,
    CalibrationFailure,
    CalibrationMessage,
    CalibrationProgress,
    CalibrationReport,
    calibrate,
)
from headstart.perf.cost_model import Coefficients
from headstart.perf.priority import give_way
from headstart.replica import make_costs, start_executor, sweep
from headstart.worker.worker import Worker

_MIN_STEPS = 6 * HELD_OUT_EVERY
_SHOW_EVERY = 0.1  # seconds


def say(message: CalibrationMessage) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


class _Teller:
    """Progress to the command, some ten times a second."""

    def __init__(self) -> None:
        self._last = ("", 0.0)

    def __call__(self, stage: str, done: int, total: int | None, /) -> None:
        now = time.monotonic()
        if done == total or stage != self._last[0] or now - self._last[1] >= _SHOW_EVERY:
            self._last = (stage, now)
            say(CalibrationProgress(stage, done, total))


def measure(setup: EngineSetup, seconds: int) -> CalibrationReport:
    """Load, sweep for `seconds`, fit and keep. Raises `StartupError` or `ConfigError`, one line with what to do."""
    tell = _Teller()
    load, started_at = os.getloadavg()[0], datetime.now(UTC).isoformat(timespec="seconds")
    config = settle_config(setup.config, setup.spec)
    config = replace(config, cache=replace(config.cache, kv_disk=None, kv_disk_size=None, kv_ram=None))  # no requests
    executor, started, max_model_len = start_executor(config, Worker(config, setup.files, setup.spec), tell)
    try:
        costs = make_costs(config, setup.files, setup.spec, started)
        believed = costs.coefficients
        observed = []
        began = time.monotonic()
        for each in sweep(config, executor, started, max_model_len, costs):
            observed.append(each)
            took = time.monotonic() - began
            tell("sweep", min(int(took), seconds), seconds)
            if took >= seconds:
                break
    finally:
        executor.shutdown()
    if len(observed) < _MIN_STEPS:
        raise StartupError(
            f"{seconds} seconds were enough for {len(observed)} steps only, too few to fit costs to: "
            "give more with --seconds"
        )
    found = calibrate(observed, believed)
    costs.take_over(Coefficients(**found.coefficients))
    if not costs.save():
        raise StartupError(f"{costs.path} cannot be written: HEADSTART_CACHE names another folder to keep costs in")
    return CalibrationReport(
        version=headstart.__version__,
        started_at=started_at,
        model=setup.files.name,
        summary=started.summary,
        threads=started.threads,
        load=load,
        seconds=took,
        was_known=costs.was_known,
        file=str(costs.path),
        calibration=found,
    )


def main(arguments: list[str]) -> int:
    give_way()
    try:
        say(measure(decode_setup(sys.stdin.buffer.read()), int(arguments[0])))
    except (StartupError, ConfigError) as error:
        say(CalibrationFailure(" ".join(str(error).split())))
        return 1
    except BrokenPipeError:  # the command is gone
        return 1
    return 0


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    os._exit(exit_code)  # at once: the interpreter takes its time to take torch apart
