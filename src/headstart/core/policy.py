"""Who goes first: one number a request, lower first. Pure arithmetic; knows nothing of queues or blocks.

A key never depends on the current time: ageing is part of it, because a request that arrived earlier has a smaller key.
So the waiting queue is in order by itself, and a step costs little whatever the queue's length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headstart.config import PolicyName, SchedulerConfig
from headstart.core.request import EngineRequest


class SchedulingPolicy(Protocol):
    def key(self, spec: EngineRequest, prefill_seconds: float) -> float:
        """Place in the order, in seconds; `prefill_seconds` is what its uncached prompt is predicted to take."""
        ...


class FirstComeFirstServed:
    """Order of arrival; a level of `priority` is worth `priority_step_ms` of waiting."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._priority_step = config.priority_step_ms / 1000

    def key(self, spec: EngineRequest, prefill_seconds: float) -> float:
        return spec.arrival_time + spec.priority * self._priority_step


class ShortestRemainingPrefillFirst:
    """Shortest remaining *uncached* prefill first, by predicted time, with ageing.

    Each second of prefill puts a request back by `srpf_weight` seconds, at most by the larger of `aging_ms` and
    `aging_factor` times its own prefill. Of two requests of the same priority, one that arrives later than that after
    the other never goes before it: nobody is overtaken without end.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._priority_step = config.priority_step_ms / 1000
        self._weight = config.srpf_weight
        self._aging = config.aging_ms / 1000
        self._factor = config.aging_factor

    def key(self, spec: EngineRequest, prefill_seconds: float) -> float:
        limit = max(self._aging, self._factor * prefill_seconds)
        put_back = min(self._weight * prefill_seconds, limit)
        return spec.arrival_time + spec.priority * self._priority_step + put_back


class EarliestDeadlineFirst:
    """By the moment at which the first token is due: arrival and `slo_ttft`, the request's or the server's."""

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.slo_ttft_ms is not None
        self._priority_step = config.priority_step_ms / 1000
        self._slo = config.slo_ttft_ms / 1000

    def key(self, spec: EngineRequest, prefill_seconds: float) -> float:
        slo = self._slo if spec.slo_ttft is None else spec.slo_ttft
        return spec.arrival_time + slo + spec.priority * self._priority_step


_POLICIES: dict[PolicyName, Callable[[SchedulerConfig], SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "srpf": ShortestRemainingPrefillFirst,
    "edf": EarliestDeadlineFirst,
}


def make_policy(config: SchedulerConfig) -> SchedulingPolicy:
    return _POLICIES[config.policy](config)
