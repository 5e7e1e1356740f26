"""The waiting requests in the policy's order: a heap whose entries are replaced, never searched.

An entry is valid while its ticket is its request's; re-keying or removing a request only invalidates the entry.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from headstart.core.request import Request


class WaitingQueue:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._members: OrderedDict[str, Request] = OrderedDict()
        self._next_ticket = 1

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: Request, key: float) -> None:
        """Add a request that is no member."""
        assert request.request_id not in self._members
        self._members[request.request_id] = request
        self._enter(request, key)

    def rekey(self, request: Request, key: float) -> None:
        """A member's place in the order changed; one that is set aside keeps the place it had."""
        if request.ticket and key != request.key:
            self._enter(request, key)

    def remove(self, request: Request) -> None:
        """Take a member out, wherever it stands."""
        del self._members[request.request_id]
        request.ticket = 0

    def set_aside(self, request: Request) -> None:
        """A member cannot go now, whatever its place: `peek` passes over it until `bring_back`."""
        request.ticket = 0

    def bring_back(self, request: Request) -> None:
        """A member that was set aside stands where it stood."""
        self._enter(request, request.key)

    def peek(self) -> Request | None:
        """The member that goes first."""
        while self._heap:
            _, ticket, request = self._heap[0]
            if request.ticket == ticket:
                return request
            heapq.heappop(self._heap)
        return None

    def rotate(self) -> Request | None:
        """Some member, each in its turn: for refreshing keys a few at a time."""
        if not self._members:
            return None
        request_id, request = next(iter(self._members.items()))
        self._members.move_to_end(request_id)
        return request

    def _enter(self, request: Request, key: float) -> None:
        if len(self._heap) > 64 + 2 * len(self._members):
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapq.heapify(self._heap)
        request.key = key
        request.ticket = self._next_ticket
        self._next_ticket += 1
        heapq.heappush(self._heap, (key, request.ticket, request))
