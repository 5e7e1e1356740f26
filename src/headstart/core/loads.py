"""Requests that wait for KV from elsewhere (`WAITING_FOR_KV`): load or recompute, and when to stop waiting.

Owns what is loading for whom. Two rules, both by predicted time:

* A load is started only if it is predicted to be over before the same blocks would be recomputed.
* It goes on only while it keeps pace: at every moment, recomputing what has arrived would have taken as long as was
  waited, but for a slack of 3 % of the whole prefill. When it falls behind, what arrived is used and the rest is
  recomputed. So however slow the source turns out to be, the wait and the rest take at most 1.03 times what recomputing
  all would have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headstart.core.chain import names
from headstart.core.connector import KVConnector
from headstart.core.cost import CostModel
from headstart.core.request import Request
from headstart.core.step import BlockFill

_SLACK = 0.03  # of the request's whole prefill


@dataclass(slots=True)
class Load:
    """`first`: how many blocks of the request's table are not loaded but were there; then come `num_blocks`."""

    load_id: int
    request: Request
    first: int
    num_blocks: int
    begin_time: float
    end_time: float  # as predicted when it began
    slack: float  # seconds
    num_arrived: int = 0
    ended: bool = False


class Loads:
    """Args: `block_size` in tokens."""

    def __init__(self, connector: KVConnector, costs: CostModel, *, block_size: int) -> None:
        self._connector = connector
        self._costs = costs
        self._size = block_size
        self._loads: dict[int, Load] = {}
        self._by_request: dict[str, Load] = {}
        self._next_id = 0
        self._fills: list[BlockFill] = []

    def __len__(self) -> int:
        return len(self._loads)

    def requests(self) -> Iterator[Request]:
        """Who waits, in the order in which the loads began."""
        return (load.request for load in self._loads.values())

    def outlook(self, now: float) -> list[tuple[Request, float, float]]:
        """Who waits: seconds until its load is over, and of the prefill that is left for it then; both as predicted."""
        found = []
        for load in self._loads.values():
            end = (load.first + load.num_blocks) * self._size
            rest = self._costs.prefill_seconds(end, load.request.num_tokens - end)
            found.append((load.request, max(0.0, load.end_time - now), rest))
        return found

    def find(self, request: Request, num_matched: int) -> None:
        """Look up how far its prompt's prefix goes on, behind the cached blocks, with blocks that can be loaded."""
        if request.block_names is None:
            most = (request.num_prompt_tokens - 1) // self._size
            request.block_names = names(request.spec.cache_salt, request.spec.prompt_token_ids, self._size, most)
        request.num_stored_blocks = num_matched + self._connector.match(request.block_names[num_matched:])

    def plan(self, request: Request, num_matched: int) -> tuple[int, float]:
        """How many blocks behind the cached ones are worth loading, as last looked up, and the seconds that takes."""
        count = request.num_stored_blocks - num_matched
        if count <= 0:
            return 0, 0.0
        if self._slack(request, num_matched) < self._connector.load_seconds(0):
            return 0, 0.0  # the first news of it would come too late
        seconds = self._connector.load_seconds(count)
        saved = self._costs.prefill_seconds(num_matched * self._size, count * self._size)
        return (count, seconds) if seconds < saved else (0, 0.0)

    def start(self, request: Request, first: int, count: int, now: float) -> None:
        """Load `count` blocks into the request's table from entry `first` on."""
        assert request.block_names is not None
        end_time = now + self._connector.load_seconds(count)
        load = Load(self._next_id, request, first, count, now, end_time, self._slack(request, first))
        self._next_id += 1
        self._loads[load.load_id] = self._by_request[request.request_id] = load
        self._connector.load(load.load_id, request.block_names[first : first + count])

    def arrived(self, load_id: int, num_blocks: int, ended: bool) -> None:
        """News of a load; of one that is over already they are ignored."""
        load = self._loads.get(load_id)
        if load is not None:
            load.num_arrived = max(load.num_arrived, min(num_blocks, load.num_blocks))
            load.ended = ended or load.num_arrived == load.num_blocks

    def take_over(self, now: float) -> list[Load]:
        """Loads that came to their end or fell behind; they are no longer kept. Each must be settled by `fill`."""
        over = [load for load in self._loads.values() if load.ended or now > self._time_to_check(load)]
        for load in over:
            self._forget(load)
        return over

    def cancel(self, request: Request) -> None:
        """The request does not wait any more, for whatever reason; nothing of its load is used."""
        load = self._by_request[request.request_id]
        self._forget(load)
        self._connector.settle(load.load_id, 0)

    def fill(self, load: Load, block_ids: list[int]) -> None:
        """The first blocks that arrived go into these blocks with the next step (-1: that one is not needed)."""
        self._connector.settle(load.load_id, len(block_ids))
        if block_ids:
            self._fills.append(BlockFill(load.load_id, tuple(block_ids)))

    def next_check(self) -> float | None:
        """When the next of the loads has fallen behind, if nothing arrives until then."""
        return min((self._time_to_check(load) for load in self._loads.values()), default=None)

    def filling(self) -> set[int]:
        """Blocks whose content comes with the next step: it is not there yet."""
        return {block_id for fill in self._fills for block_id in fill.block_ids}

    def take_fills(self) -> tuple[BlockFill, ...]:
        """For the next step, once."""
        fills, self._fills = tuple(self._fills), []
        return fills

    def _slack(self, request: Request, num_matched: int) -> float:
        start = num_matched * self._size
        return _SLACK * self._costs.prefill_seconds(start, request.num_tokens - start)

    def _time_to_check(self, load: Load) -> float:
        arrived = self._costs.prefill_seconds(load.first * self._size, load.num_arrived * self._size)
        return load.begin_time + arrived + load.slack

    def _forget(self, load: Load) -> None:
        del self._loads[load.load_id], self._by_request[load.request.request_id]

    def check_invariants(self) -> None:
        assert {load.request.request_id for load in self._loads.values()} == self._by_request.keys()
        for load in self._loads.values():
            assert len(load.request.block_table) >= load.first + load.num_blocks
            assert load.request.num_indexed_blocks == load.first
