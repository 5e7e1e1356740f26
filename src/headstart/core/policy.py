"""Who goes first: one number a request, lower first. Pure arithmetic; knows nothing of queues or blocks.

A key is a moment, and does not change as time passes: who waits comes up by itself, because those who arrive later have
later moments. So the waiting queue is in order by itself, and a step costs little whatever the queue's length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headstart.config import PolicyName, SchedulerConfig
from headstart.core.request import EngineRequest


class SchedulingPolicy(Protocol):
    def key(self, spec: EngineRequest, turn: float, prefill_seconds: float) -> float:
        """Place in the order, in seconds of the clock. `turn`: when its prefill would have begun, had everybody been
        served in order of arrival. `prefill_seconds`: what its uncached prompt is predicted to take."""
        ...


class FirstComeFirstServed:
    """Order of arrival; a level of `priority` is worth `priority_step_ms` of waiting."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._priority_step = config.priority_step_ms / 1000

    def key(self, spec: EngineRequest, turn: float, prefill_seconds: float) -> float:
        return spec.arrival_time + spec.priority * self._priority_step


class ShortestRemainingPrefillFirst:
    """Shortest remaining *uncached* prefill first, by predicted time, with a bound on how long anybody waits for it.

    Each second of prefill puts a request back by `srpf_weight` seconds from where first come, first served would have
    it done, at most by the larger of `aging_ms` and `aging_factor` times its own prefill. That moment is its deadline,
    and the earliest goes first. Served in order of arrival everybody would be done before their deadline; so by the
    earliest deadline everybody is, too (Liu and Layland, 1973; Dertouzos, 1974), whoever else arrives, as far as the
    predictions hold and there is room in the KV pool.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._priority_step = config.priority_step_ms / 1000
        self._weight = config.srpf_weight
        self._aging = config.aging_ms / 1000
        self._factor = config.aging_factor

    def key(self, spec: EngineRequest, turn: float, prefill_seconds: float) -> float:
        limit = max(self._aging, self._factor * prefill_seconds)
        put_back = min(self._weight * prefill_seconds, limit)
        return turn + prefill_seconds + put_back + spec.priority * self._priority_step


class EarliestDeadlineFirst:
    """By the moment at which the first token is due: arrival and `slo_ttft`, the request's or the server's."""

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.slo_ttft_ms is not None
        self._priority_step = config.priority_step_ms / 1000
        self._slo = config.slo_ttft_ms / 1000

    def key(self, spec: EngineRequest, turn: float, prefill_seconds: float) -> float:
        slo = self._slo if spec.slo_ttft is None else spec.slo_ttft
        return spec.arrival_time + slo + spec.priority * self._priority_step


_POLICIES: dict[PolicyName, Callable[[SchedulerConfig], SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "srpf": ShortestRemainingPrefillFirst,
    "edf": EarliestDeadlineFirst,
}


def make_policy(config: SchedulerConfig) -> SchedulingPolicy:
    return _POLICIES[config.policy](config)
