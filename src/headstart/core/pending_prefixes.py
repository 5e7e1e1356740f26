"""Prefixes that are being computed: who arrives with the same one waits for it instead of computing it again.

Owns who computes and who waits for whom; knows nothing of budgets or order. A waiter's *owner* is a running request
that computes, as its very next or in a step in flight, the block after all that the waiter finds in the cache. The
wait ends when the last block that both have in common is indexed, or when the owner stops running, whatever the reason:
so nobody waits for what will not come. The scheduler runs the owner at its waiter's place if that is the earlier one:
so the prefix is there about when the waiter would have computed it itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from headstart.core.request import Request, RequestStatus

_ALIVE = (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_KV)  # blocks come of it


@dataclass(slots=True)
class _Wait:
    """Those who wait for one owner: a heap by their place in the order, and the first number of blocks that frees one.

    Who was aborted stays in the heap until it comes up.
    """

    owner: Request
    first_goal: int
    waiters: list[tuple[float, int, int, Request]] = field(default_factory=list)  # key, ticket, goal in blocks, request


class PendingPrefixes:
    """Args: `block_size` in tokens; `min_tokens`: fewer in common are not worth a step of waiting."""

    def __init__(self, *, block_size: int, min_tokens: int) -> None:
        self._size = block_size
        self._min_tokens = min_tokens
        self._computing: dict[str, Request] = {}  # running requests whose prompts were not all indexed when last seen
        self._waits: dict[str, _Wait] = {}  # by the owner's id
        self._next_ticket = 0

    def started(self, request: Request) -> None:
        """A request was admitted: it has blocks to compute that others may want."""
        if request.num_prompt_tokens - request.num_computed_tokens >= self._min_tokens:
            self._computing[request.request_id] = request

    def ended(self, request: Request) -> None:
        """A request that was admitted does not run any more."""
        self._computing.pop(request.request_id, None)

    def wait_for_owner(self, request: Request, matched: Sequence[int]) -> Request | None:
        """If somebody computes what the request would compute next, make it wait, and return that owner.

        `matched`: the blocks of the request's prefix that are cached.
        """
        for owner in list(self._computing.values()):
            if owner.num_indexed_blocks >= owner.num_prompt_tokens // self._size:
                del self._computing[owner.request_id]
                continue
            goal = self._common_blocks(request, matched, owner)
            if (goal - len(matched)) * self._size >= self._min_tokens:
                wait = self._waits.setdefault(owner.request_id, _Wait(owner, goal))
                wait.first_goal = min(wait.first_goal, goal)
                heapq.heappush(wait.waiters, (request.key, self._next_ticket, goal, request))
                self._next_ticket += 1
                return owner
        return None

    def lent_key(self, owner: Request) -> float | None:
        """The earliest place in the order among those who wait for `owner`; None: nobody does."""
        wait = self._waits.get(owner.request_id)
        while wait is not None and wait.waiters:
            key, _, _, request = wait.waiters[0]
            if request.status is not RequestStatus.FINISHED:
                return key
            heapq.heappop(wait.waiters)
        return None

    def take_ready(self) -> list[Request]:
        """Those whose wait is over, in no order; each is told of once."""
        ready: list[Request] = []
        for owner_id, wait in list(self._waits.items()):
            running = wait.owner.status in _ALIVE
            num_indexed = wait.owner.num_indexed_blocks
            if running and num_indexed < wait.first_goal:
                continue
            still = [entry for entry in wait.waiters if running and num_indexed < entry[2]]
            ready += [entry[3] for entry in wait.waiters if not (running and num_indexed < entry[2])]
            if still:
                heapq.heapify(still)
                wait.waiters = still
                wait.first_goal = min(goal for _, _, goal, _ in still)
            else:
                del self._waits[owner_id]
        return [request for request in ready if request.status is not RequestStatus.FINISHED]

    def waiting(self) -> list[Request]:
        """Everybody who waits for an owner; for tests."""
        entries = [entry for wait in self._waits.values() for entry in wait.waiters]
        return [request for _, _, _, request in entries if request.status is not RequestStatus.FINISHED]

    def _common_blocks(self, request: Request, matched: Sequence[int], owner: Request) -> int:
        """Leading blocks that `owner` will index and `request` can use; 0 unless what it needs next is next there."""
        size, start, indexed = self._size, len(matched), owner.num_indexed_blocks
        if owner.spec.cache_salt != request.spec.cache_salt or indexed > start:
            return 0
        if owner.num_computed_tokens < start * size:
            return 0  # it is behind what others have computed
        if indexed and owner.block_table[indexed - 1] != matched[indexed - 1]:
            return 0
        theirs, ours = owner.token_ids, request.token_ids
        last = min(owner.num_prompt_tokens, request.num_tokens - 1) // size  # the last token is always computed
        goal = indexed
        while goal < last and theirs[goal * size : (goal + 1) * size] == ours[goal * size : (goal + 1) * size]:
            goal += 1
        return goal if goal > start else 0
