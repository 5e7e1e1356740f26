"""The calibration's steps: chance picks their shapes, over all that a scheduler grants. Knows no torch and no clock.

Prefills alone, decodes alone, and both in one step take turns; sizes and contexts are spread evenly over their
logarithms. So a sweep may be cut off anywhere.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headstart.core.cost import StepWork
from headstart.core.request import SamplingParams
from headstart.core.step import SchedulerOutput
from headstart.worker.stage import Player, Stage

_PARAMS = SamplingParams(max_tokens=1 << 20)  # as of a request that says nothing
_STEPS = 4  # of a scene
_BEGINNINGS = 0.5  # share of prefills from a prompt's first token on
_PAIRS = 0.25  # share of steps with prefills that have two of them

MayTake = Callable[[StepWork], bool]


@dataclass(frozen=True, slots=True)
class SweepLimits:
    """What steps must keep to. `max_model_len` and `max_num_batched_tokens` in tokens."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int


def sweep_steps(
    limits: SweepLimits, rng: random.Random, may_take: MayTake
) -> Iterator[tuple[SchedulerOutput, StepWork | None]]:
    """Steps to execute in order, without end, each with the work in it; None: it is none to be timed.

    `may_take` says whether a step would be short enough; the smallest of a kind come also if it says no.
    """
    sweep = _Sweep(limits, rng, may_take)
    for number in itertools.count():
        yield from sweep.scene(with_decodes=number % 3 != 0)


class _Sweep:
    def __init__(self, limits: SweepLimits, rng: random.Random, may_take: MayTake) -> None:
        self._limits = limits
        self._rng = rng
        self._may_take = may_take
        self._stage = Stage(limits.num_blocks, limits.block_size, limits.max_model_len)

    def scene(self, *, with_decodes: bool) -> Iterator[tuple[SchedulerOutput, StepWork | None]]:
        """Some requests decode, alone and beside prefills in turn; or prefills alone. In the end all are forgotten."""
        stage = self._stage
        cast = self._cast() if with_decodes else []
        if cast:
            yield stage.step([(player, 1) for player in cast]), None  # the worker gets to know them
        for index in range(_STEPS):
            decoding = [player for player in cast if stage.has_room(player)]
            work = _decodes([player.num_tokens for player in decoding])
            chunks = [(player, 1) for player in decoding]
            silent: list[Player] = []
            if index % 2 or not decoding:
                for number in range(2 if self._rng.random() < _PAIRS else 1):
                    found = self._prefill(f"prefill {index} {number}", work)
                    if found is None:
                        break
                    player, count, is_last = found
                    work = work.with_prefill(player.num_tokens - count, count, is_last)
                    chunks.append((player, count))
                    silent += [] if is_last else [player]
            if chunks:
                yield stage.step(chunks, silent=silent), work
        yield stage.end(), None

    def _cast(self) -> list[Player]:
        """Requests that decode, with contexts as long as one another; half of the pool stays for prefills."""
        limits, may_take = self._limits, self._may_take
        count = self._between(1, limits.max_num_seqs)
        tokens = limits.num_blocks * limits.block_size // 2
        context = self._between(1, max(1, min(limits.max_model_len, tokens // count) - _STEPS - 1))
        while count > 1 and not may_take(_decodes([context] * count)):
            count //= 2
        dealt = [
            self._stage.deal(f"decode {index}", context, spare=_STEPS + 1, params=_PARAMS) for index in range(count)
        ]
        return [player for player in dealt if player is not None]

    def _prefill(self, name: str, work: StepWork) -> tuple[Player, int, bool] | None:
        """A request, how many tokens of it to compute beside `work`, and whether that is the last chunk; or None."""
        size, room = self._limits.block_size, self._stage.room - 1
        tokens = self._limits.max_num_batched_tokens - work.num_prefill_tokens - work.num_decodes
        if min(tokens, room) < 1:
            return None
        is_last = self._rng.random() < 0.5
        is_first = self._rng.random() < _BEGINNINGS
        start = 0 if is_first else self._between(1, room) // size * size
        count = self._between(1, max(1, min(tokens, room - start)))
        while count > 1 and not self._may_take(work.with_prefill(start, count, is_last)):
            count //= 2
        if not is_last and count > size:
            count = count // size * size  # as a scheduler cuts chunks
        player = self._stage.deal(name, start + count, spare=1, params=_PARAMS)
        return None if player is None else (player, min(count, player.num_tokens), is_last)

    def _between(self, low: int, high: int) -> int:
        """As likely in one octave as in another."""
        return min(high, int(math.exp(self._rng.uniform(math.log(low), math.log(high + 1)))))


def _decodes(contexts: list[int]) -> StepWork:
    """The last known token of each is computed."""
    return StepWork(num_decodes=len(contexts), decode_context=float(sum(contexts)), num_samples=len(contexts))
