"""Promises: when a newcomer would have its first token, and whether it is let in. By the queue as it stands now.

Owns what is learned for it: how far off predictions are, and how long answers usually get. What is predicted from a
given queue is `core.forecast`'s.
"""

from __future__ import annotations

from headstart.config import SchedulerConfig
from headstart.core.cost import CostModel
from headstart.core.errors import SloMiss
from headstart.core.forecast import Forecast, Line, Margin, forecast
from headstart.core.kv_cache_manager import KVCacheManager
from headstart.core.request import Request
from headstart.core.scheduler import Scheduler

_FIRST_GUESS_OF_TOKENS = 128.0  # of an answer, before any has ended
_USUAL_TOKENS_RATE = 0.05


class Promises:
    """`step_left` everywhere: seconds until the steps in flight are done, as predicted."""

    def __init__(self, config: SchedulerConfig, costs: CostModel, kv: KVCacheManager, scheduler: Scheduler) -> None:
        self._config = config
        self._costs = costs
        self._kv = kv
        self._scheduler = scheduler
        self._margin = Margin()
        self._usual_tokens = _FIRST_GUESS_OF_TOKENS

    def forecast(self, request: Request, now: float, step_left: float) -> Forecast:
        """Of a request that was not added yet; gives it the key that it would have."""
        size = self._kv.block_size
        view = self._scheduler.view_of(request, now)
        room = -(-request.num_tokens // size) - view.num_held_blocks
        seats = self._config.max_num_seqs - self._scheduler.num_running - self._scheduler.num_loading
        line = Line(
            step_left=step_left,
            decodes=view.decodes,
            tokens_left=[max(1.0, min(most, self._usual_tokens - done)) for done, most in view.answers],
            usual_tokens=self._usual_tokens,
            ahead=view.num_ahead,
            seconds_ahead=view.seconds_ahead,
            seats=(seats if self._kv.num_free_blocks >= room else 0) + view.num_seated_ahead,
            loading=view.loading,
        )
        return forecast(
            self._config,
            self._costs,
            line,
            block_size=size,
            cached=view.num_cached_tokens,
            tokens=request.num_tokens - view.num_cached_tokens,
            load_seconds=view.load_seconds,
        )

    def make(self, request: Request, now: float, step_left: float) -> None:
        """Note when a request that is about to be added is predicted to have its first token.

        Raises `SloMiss` where it is not to be let in.
        """
        found = self.forecast(request, now, step_left)
        request.added_time, request.forecast_time = now, now + found.seconds
        request.expected_time = request.forecast_time
        if self._config.on_slo_miss == "reject":
            self._check(request, found, now)

    def came_due(self, request: Request, now: float) -> float:
        """A request has its first token: seconds from its arrival to it, as they were predicted."""
        self._margin.learn(request.forecast_time - request.added_time, now - request.added_time)
        return request.forecast_time - request.spec.arrival_time

    def answered(self, num_tokens: int) -> None:
        """An answer came to its end."""
        self._usual_tokens += _USUAL_TOKENS_RATE * (num_tokens - self._usual_tokens)

    def _check(self, request: Request, found: Forecast, now: float) -> None:
        """Let it in only if its own SLO and those of the requests that it would put off are predicted to hold."""
        spec, factor = request.spec, self._margin.factor
        # What has passed since the arrival is no prediction.
        late = 0.0
        if spec.slo_ttft is not None:
            late = now + found.seconds * factor - (spec.arrival_time + spec.slo_ttft)
            if late > 0:
                raise SloMiss(request.forecast_time - spec.arrival_time, spec.slo_ttft, late)
        # While another's KV is loading, nobody puts it off.
        behind = [
            (other, min(found.compute_seconds, max(0.0, found.seconds - load_left)))
            for other, load_left in self._scheduler.behind(request, now)
        ]
        for other, delay in behind:
            if other.spec.slo_ttft is not None and spec.slo_ttft is not None:
                due = other.spec.arrival_time + other.spec.slo_ttft
                put_off = now + (other.expected_time - now + delay) * factor
                if put_off > due >= now + (other.expected_time - now) * factor:
                    raise SloMiss(request.forecast_time - spec.arrival_time, spec.slo_ttft, put_off - due)
        for other, delay in behind:
            other.expected_time += delay
