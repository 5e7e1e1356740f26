"""The chunk sizes that a server chose during a run: its histogram of prompt tokens a step, read before and after."""

from __future__ import annotations

import math
import re

import msgspec

METRIC = "headstart_step_prefill_tokens"  # headstart's; of other servers nothing is shown
_BUCKET = re.compile(METRIC + r'_bucket\{le="([^"]+)"\} (\d+)')

Cumulative = dict[float, int]  # steps so far by upper bound


class ChunkClass(msgspec.Struct, kw_only=True):
    """`steps` computed more than `above` and at most `up_to` prompt tokens (None: no bound)."""

    above: int
    up_to: int | None
    steps: int


def read_chunks(exposition: str) -> Cumulative:
    """From a `/metrics` page; empty if it has no such histogram."""
    return {float(bound): int(count) for bound, count in _BUCKET.findall(exposition)}


def chunks_between(before: Cumulative, after: Cumulative) -> list[ChunkClass]:
    """The classes that got steps, ascending."""
    found = []
    above, seen = 0, 0
    for bound in sorted(after):
        so_far = after[bound] - before.get(bound, 0)
        if so_far > seen:
            up_to = None if math.isinf(bound) else int(bound)
            found.append(ChunkClass(above=above, up_to=up_to, steps=so_far - seen))
        above, seen = (above if math.isinf(bound) else int(bound)), so_far
    return found


def add_chunks(rounds: list[list[ChunkClass]]) -> list[ChunkClass]:
    """Several rounds as one."""
    steps: dict[tuple[int, int | None], int] = {}
    for chunks in rounds:
        for each in chunks:
            key = each.above, each.up_to
            steps[key] = steps.get(key, 0) + each.steps
    ordered = sorted(steps.items(), key=lambda item: item[0][0])
    return [ChunkClass(above=above, up_to=up_to, steps=count) for (above, up_to), count in ordered]
