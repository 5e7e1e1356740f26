"""When a request that arrives now would have its first token: from the real queue, the real cache and the cost model.

Whoever arrives later and goes first is not foreseen; `Margin` learns how far off predictions are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headstart.config import SchedulerConfig
from headstart.core.cost import CostModel, StepWork


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds from now on: until its own prefill begins, and what that takes with the steps of others around it.

    `num_ahead`: requests that would go before it. `prefill_seconds`: of its uncached tokens, by themselves.
    `load_seconds`: until KV blocks that it loads from a tier are there; `num_cached_tokens` count them.
    """

    queue_seconds: float
    compute_seconds: float
    prefill_seconds: float
    num_cached_tokens: int
    num_ahead: int
    load_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.queue_seconds + self.load_seconds + self.compute_seconds


@dataclass(frozen=True, slots=True)
class Line:
    """The engine as a newcomer finds it.

    `step_left`: seconds until the steps in flight are done. `decodes`: what a step decodes now. `tokens_left`: about
    how many tokens each running request still yields; `usual_tokens`: how many one yields on average. `ahead` requests
    with `seconds_ahead` of prefill go before the newcomer; for so many of them and it there are `seats`. `loading`:
    requests that wait for their KV and go before it then: seconds until then, and of the prefill that is left.
    """

    step_left: float
    decodes: StepWork
    tokens_left: Sequence[float]
    usual_tokens: float
    ahead: int
    seconds_ahead: float
    seats: int
    loading: Sequence[tuple[float, float]] = ()


def forecast(
    config: SchedulerConfig,
    costs: CostModel,
    line: Line,
    *,
    block_size: int,
    cached: int,
    tokens: int,
    load_seconds: float = 0.0,
) -> Forecast:
    """Of a request with `tokens` to compute behind `cached` ones, some of which take `load_seconds` to be there."""
    found = _forecast(config, costs, line, block_size, cached, tokens, load_seconds)
    for left, prefill in sorted(line.loading):
        if left >= found.seconds:
            break  # the newcomer has its token before
        line = replace(line, ahead=line.ahead + 1, seats=line.seats + 1, seconds_ahead=line.seconds_ahead + prefill)
        found = _forecast(config, costs, line, block_size, cached, tokens, load_seconds)
    return found


def _forecast(
    config: SchedulerConfig,
    costs: CostModel,
    line: Line,
    block_size: int,
    cached: int,
    tokens: int,
    load_seconds: float,
) -> Forecast:
    own = costs.prefill_seconds(cached, tokens)
    # Those ahead decode, too, once they have had their turn: half of them on average, until the last has.
    decoding = min(line.decodes.num_decodes + line.ahead // 2, config.max_num_seqs)
    block = costs.prefill_seconds(cached, block_size)  # a step goes on by a block at least
    mixed = _Steps(config.slo_tpot_ms / 1000, costs.step_seconds(_scaled(line.decodes, decoding)), block)
    alone = _Steps(config.max_chunk_ms / 1000, costs.step_seconds(StepWork()), block)
    steps = mixed if decoding else alone
    waiting = steps.seconds(line.seconds_ahead, line.ahead) + _seat_seconds(line, steps)
    return Forecast(line.step_left + waiting, steps.seconds(own, 1), own, cached, line.ahead, load_seconds)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of `limit` seconds, of which `overhead` are not for prefill, and `least` are."""

    limit: float
    overhead: float
    least: float

    def seconds(self, prefill: float, requests: int) -> float:
        """How long so much prefill takes; the step that ends a request's prefill does little else."""
        if requests == 0:
            return prefill
        room = max(self.limit - self.overhead, self.least)
        steps = max(requests, math.ceil(prefill / room) if room > 0 else 0)
        return prefill + steps * self.overhead


def _scaled(decodes: StepWork, count: int) -> StepWork:
    """As many decodes, with contexts like theirs."""
    if decodes.num_decodes == 0:
        return StepWork(num_decodes=count, num_samples=count)
    context = decodes.decode_context / decodes.num_decodes * count
    return StepWork(num_decodes=count, decode_context=context, num_samples=count)


def _seat_seconds(line: Line, steps: _Steps) -> float:
    """Until enough running requests have ended to make room."""
    missing = line.ahead + 1 - line.seats
    if missing <= 0 or not line.tokens_left:
        return 0.0
    left = sorted(line.tokens_left)
    rounds, place = divmod(missing - 1, len(left))
    return (left[place] + rounds * line.usual_tokens) * max(steps.overhead, steps.limit / 2)


class Margin:
    """By how much a prediction must be multiplied to hold nine times out of ten, as learned from those that came due.

    Each that was exceeded raises it, each that held lowers it nine times less.
    """

    _STEP = 0.05
    _MOST = 3.0

    def __init__(self) -> None:
        self.factor = 1.0

    def learn(self, predicted: float, real: float) -> None:
        """Seconds from the prediction on."""
        exceeded = real > predicted * self.factor
        self.factor += self._STEP * (0.9 if exceeded else -0.1)
        self.factor = min(max(self.factor, 1.0), self._MOST)
