"""Mailboxes: what one caller has not read yet. Owns the coalescing that bounds a slow caller's memory.

It must not know where outputs come from; one event loop's thread uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headstart.core.step import RequestOutput

_MERGE_AT = 16


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Consecutive outputs of one request as one: tokens joined, the newest state, the oldest `time` and the ledger.

    The oldest time, because it says since when the caller could have had the first of these tokens.
    """
    if len(outputs) == 1:
        return outputs[0]
    return outputs[-1]._replace(
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
        prompt_logprobs=tuple(entry for output in outputs for entry in output.prompt_logprobs),
        time=outputs[0].time,
        ledger=next((output.ledger for output in outputs if output.ledger), ()),
        predicted_ttft=max(output.predicted_ttft for output in outputs),
    )


class Mailbox:
    """Unread outputs of one request. One reader."""

    def __init__(self) -> None:
        self._unread: list[RequestOutput] = []
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        self._unread.append(output)
        if len(self._unread) >= _MERGE_AT:
            self._unread[:] = [merge_outputs(self._unread)]
        self._wake()

    def fail(self, error: Exception) -> None:
        """What has come is still read, then `error` is raised."""
        self._error = error
        self._wake()

    async def take(self) -> RequestOutput:
        """Everything unread, as one output; waits if there is nothing."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        unread, self._unread = self._unread, []
        return merge_outputs(unread)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
