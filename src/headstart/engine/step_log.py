"""The step log: one JSON object a line for each step, for whoever wants to know which steps are predicted badly.

Owns the file. It must never harm serving: what cannot be written is left out, and said once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from headstart.core.events import Event, StepRetired
from headstart.executor.base import StartupError

logger = logging.getLogger(__name__)


class StepRecord(msgspec.Struct, kw_only=True):
    """A line. `at`: Unix seconds when the step was done; `sample_seconds` are a part of `seconds`.

    `work`: the numbers of a `core.cost.StepWork`, by name.
    """

    at: float
    step: int
    seconds: float
    predicted_seconds: float
    sample_seconds: float
    work: dict[str, float]


class StepLog:
    """Appends to `path`, line by line. `clock` gives Unix seconds. Raises `StartupError` if it cannot be opened."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._encoder = msgspec.json.Encoder()
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise StartupError(f"the step log {path} cannot be written: {error.strerror}") from error

    def observe(self, events: Iterable[Event]) -> None:
        """Write the steps among `events` that computed something."""
        if self._file.closed:
            return
        lines = b"".join(
            self._encoder.encode(self._record(event)) + b"\n"
            for event in events
            if isinstance(event, StepRetired) and event.num_scheduled_tokens
        )
        try:
            if lines:
                self._file.write(lines)
        except OSError as error:
            logger.warning("the step log %s ends here: %s", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        """Nothing is written any more. Safe to call twice."""
        self._file.close()

    def _record(self, event: StepRetired) -> StepRecord:
        return StepRecord(
            at=round(self._clock(), 6),
            step=event.step_id,
            seconds=round(event.seconds, 6),
            predicted_seconds=round(event.predicted_seconds, 6),
            sample_seconds=round(event.sample_seconds, 6),
            work=event.work._asdict(),
        )


def read_step_log(path: Path) -> list[StepRecord]:
    """All whole lines of a log. Raises `OSError`, and `ValueError` for what is no such log."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1].splitlines()
    return [msgspec.json.decode(line, type=StepRecord) for line in whole]
