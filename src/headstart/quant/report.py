"""What happened to a checkpoint's weights on their way into memory, said once a kind and not once a tensor."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class Report:
    """One a load. `say` logs a line at level INFO, the first time that it is said."""

    def __init__(self) -> None:
        self._said: dict[str, None] = {}

    def say(self, line: str) -> None:
        if line not in self._said:
            self._said[line] = None
            logger.info("%s", line)

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self._said)
