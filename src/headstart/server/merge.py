"""Several asynchronous generators as one, in the order in which their items come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
_START_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Ends when all have ended; the first error of one ends all. Closing it closes every source before it returns.

    A consumer that is slow holds the sources up: at most one item of each waits here.
    """
    if len(sources) == 1:  # the common case costs no task and no queue
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield item
        return
    queue: asyncio.Queue[T | _End] = asyncio.Queue(maxsize=len(sources))
    entry: T | _End
    tasks: list[asyncio.Task[None]] = []
    try:
        for source in sources:
            tasks.append(asyncio.create_task(_pump(source, queue)))
            if len(tasks) % _START_AT_ONCE == 0:  # each has its first turn; nobody else waits for a thousand of them
                await asyncio.sleep(0)
        left = len(tasks)
        while left:
            entry = await queue.get()
            if isinstance(entry, _End):
                if entry.error is not None:
                    raise entry.error
                left -= 1
            else:
                yield entry
    finally:
        for source in sources[len(tasks) :]:
            await source.aclose()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(source: AsyncGenerator[T, None], queue: asyncio.Queue[T | _End]) -> None:
    error: Exception | None = None
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put(item)
    except Exception as failure:
        error = failure
    await queue.put(_End(error))
