"""Who goes first: one number a request, lower first. Pure arithmetic; knows nothing of queues or blocks.

A key never depends on the current time: ageing is part of it, because a request that arrived earlier has a smaller key.
So the waiting queue is a heap, and a step costs O(log n) whatever the queue's length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headstart.config import PolicyName, SchedulerConfig
from headstart.core.request import EngineRequest


class SchedulingPolicy(Protocol):
    def key(self, spec: EngineRequest, num_uncached_tokens: int) -> float:
        """Place in the order, in seconds; `num_uncached_tokens` of prefill remain."""
        ...


class FirstComeFirstServed:
    """Order of arrival; a level of `priority` is worth `priority_step_ms` of waiting."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._priority_step = config.priority_step_ms / 1000

    def key(self, spec: EngineRequest, num_uncached_tokens: int) -> float:
        return spec.arrival_time + spec.priority * self._priority_step


class ShortestRemainingPrefillFirst:
    """Shortest remaining *uncached* prefill first, with ageing.

    Each uncached token puts a request back by `srpf_ms_per_token`, at most by `aging_ms` in all. So of two requests of
    the same priority, one that arrives more than min(aging_ms, srpf_ms_per_token × the first one's tokens) later never
    goes first: nobody is overtaken without end.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._priority_step = config.priority_step_ms / 1000
        self._per_token = config.srpf_ms_per_token / 1000
        self._limit = config.aging_ms / 1000

    def key(self, spec: EngineRequest, num_uncached_tokens: int) -> float:
        put_back = min(num_uncached_tokens * self._per_token, self._limit)
        return spec.arrival_time + spec.priority * self._priority_step + put_back


_POLICIES: dict[PolicyName, Callable[[SchedulerConfig], SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "srpf": ShortestRemainingPrefillFirst,
}


def make_policy(config: SchedulerConfig) -> SchedulingPolicy:
    return _POLICIES[config.policy](config)
