"""The waiting requests: each tenant's in the policy's order, and the tenants in turn, by deficit round robin.

Deficit round robin (Shreedhar and Varghese, 1995): a tenant's turn lasts until the predicted prefill time of what it
was served exceeds its credit; each round gives everyone the same credit more. So who floods the queue delays its own
requests, not the others'. With one tenant waiting, the policy's order is all there is.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict

from headstart.core.request import Request

_QUANTUM_SECONDS = 0.1  # of prefill, a round
_LEAST_CHARGE = 1e-6  # even who costs nothing passes the turn on


class _Lane:
    """One tenant's waiting requests in order: `entries[i]` is `(key, ticket)` of `requests[i]`."""

    __slots__ = ("credit", "entries", "requests", "seconds")

    def __init__(self) -> None:
        self.credit = 0.0
        self.entries: list[tuple[float, int]] = []
        self.requests: list[Request] = []
        self.seconds: list[float] = []  # of prefill, predicted

    def enter(self, request: Request) -> None:
        entry = (request.key, request.ticket)
        index = bisect_left(self.entries, entry)
        self.entries.insert(index, entry)
        self.requests.insert(index, request)
        self.seconds.insert(index, request.prefill_seconds)

    def leave(self, request: Request) -> None:
        index = bisect_left(self.entries, (request.key, request.ticket))
        assert self.requests[index] is request
        del self.entries[index], self.requests[index], self.seconds[index]

    def ahead_of(self, key: float) -> tuple[int, float]:
        index = bisect_left(self.entries, (key, 0))
        return index, sum(self.seconds[:index])


class WaitingQueue:
    """A member that is set aside has `ticket` 0 and stands in no lane."""

    def __init__(self) -> None:
        self._members: OrderedDict[str, Request] = OrderedDict()
        self._lanes: OrderedDict[str, _Lane] = OrderedDict()  # by tenant; those with requests; whose turn it is, first
        self._next_ticket = 1

    def __len__(self) -> int:
        return len(self._members)

    @property
    def seconds(self) -> float:
        """Predicted prefill of all who are not set aside."""
        return sum([sum(lane.seconds) for lane in self._lanes.values()])

    def push(self, request: Request, key: float) -> None:
        """Add a request that is no member."""
        assert request.request_id not in self._members
        self._members[request.request_id] = request
        self._enter(request, key)

    def rekey(self, request: Request, key: float) -> None:
        """A member's place in the order changed; one that is set aside keeps the place it had."""
        if request.ticket and key != request.key:
            self._leave(request)
            self._enter(request, key)

    def remove(self, request: Request) -> None:
        """Take a member out, wherever it stands."""
        del self._members[request.request_id]
        self._leave(request)

    def set_aside(self, request: Request) -> None:
        """A member cannot go now, whatever its place: `peek` passes over it until `bring_back`."""
        self._leave(request)

    def bring_back(self, request: Request) -> None:
        """A member that was set aside stands where it stood."""
        self._enter(request, request.key)

    def peek(self) -> Request | None:
        """The member that goes first."""
        lanes = self._lanes
        if len(lanes) <= 1:
            return next(iter(lanes.values())).requests[0] if lanes else None
        while True:
            for _ in range(len(lanes)):
                lane = next(iter(lanes.values()))
                if lane.credit >= lane.seconds[0]:
                    return lane.requests[0]
                lanes.move_to_end(next(iter(lanes)))
            # As many rounds at once as the first who can go needs.
            rounds = min(math.ceil((lane.seconds[0] - lane.credit) / _QUANTUM_SECONDS) for lane in lanes.values())
            for lane in lanes.values():
                lane.credit += max(rounds, 1) * _QUANTUM_SECONDS

    def charge(self, request: Request) -> None:
        """A member is served now: its tenant pays for it if others wait."""
        lane = self._lanes.get(request.spec.tenant)
        if lane is not None and len(self._lanes) > 1:
            lane.credit -= max(request.prefill_seconds, _LEAST_CHARGE)

    def rotate(self) -> Request | None:
        """Some member, each in its turn: for refreshing keys a few at a time."""
        if not self._members:
            return None
        request_id, request = next(iter(self._members.items()))
        self._members.move_to_end(request_id)
        return request

    def ahead_of(self, tenant: str, key: float, seconds: float) -> tuple[int, float]:
        """How many members would go before a newcomer with `seconds` of prefill, and their seconds, roughly.

        All of its own tenant with a smaller key; of each other tenant about as much as it is served itself until then.
        """
        own = self._lanes.get(tenant)
        count, total = own.ahead_of(key) if own is not None else (0, 0.0)
        share = total + seconds
        for name, lane in self._lanes.items():
            if name != tenant:
                waiting = sum(lane.seconds)
                part = min(1.0, share / waiting) if waiting else 1.0
                count += math.ceil(part * len(lane.requests))
                total += part * waiting
        return count, total

    def behind(self, tenant: str, key: float) -> list[Request]:
        """Its own tenant's members with a larger key."""
        lane = self._lanes.get(tenant)
        return [] if lane is None else lane.requests[bisect_left(lane.entries, (key, 0)) :]

    def _enter(self, request: Request, key: float) -> None:
        request.key = key
        request.ticket = self._next_ticket
        self._next_ticket += 1
        tenant = request.spec.tenant
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = _Lane()
        lane.enter(request)

    def _leave(self, request: Request) -> None:
        if request.ticket:
            lane = self._lanes[request.spec.tenant]
            lane.leave(request)
            request.ticket = 0
            if not lane.requests:
                del self._lanes[request.spec.tenant]

    def check_invariants(self) -> None:
        standing = [request for lane in self._lanes.values() for request in lane.requests]
        assert len({request.request_id for request in standing}) == len(standing)
        for tenant, lane in self._lanes.items():
            assert lane.requests
            assert lane.entries == sorted(lane.entries) == [(each.key, each.ticket) for each in lane.requests]
            assert all(each.spec.tenant == tenant for each in lane.requests)
        assert {each.request_id for each in standing} == {
            each.request_id for each in self._members.values() if each.ticket
        }
