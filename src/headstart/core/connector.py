"""The scheduler's half of KV that comes from elsewhere: a tier (RAM, disk), later another replica.

To the scheduler a load is an asynchronous prefix hit: it asks what there is and how long it would take, starts a load,
and hears by `EngineCore.kv_arrived` how far it came. What arrived is staged; the step that carries the load's
`BlockFill` puts it into the request's blocks. Calls must be quick and never fail: no reading, no waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class KVArrival(NamedTuple):
    """How far a load came: its first `num_blocks` blocks are staged. `ended`: no more will come."""

    load_id: int
    num_blocks: int
    ended: bool


class TierState(NamedTuple):
    """A tier at one moment. `kind`: ram or disk. One that failed is not on until the next start, and holds no blocks.

    `num_bytes`: what it takes in memory or files, those that it cannot use included.
    """

    kind: str
    is_on: bool
    num_blocks: int
    num_bytes: int


class KVConnector(Protocol):
    """Names are those of `core.chain`."""

    @property
    def num_dropped_blocks(self) -> int:
        """Since the start: they left the prefix cache faster than could be kept."""
        ...

    def tier_states(self) -> tuple[TierState, ...]:
        """Of each tier, the fastest first. Asked for after every step."""
        ...

    def match(self, names: Sequence[bytes]) -> int:
        """How many of the leading names can be loaded."""
        ...

    def stores(self, name: bytes) -> bool:
        """This one is kept already, or about to be."""
        ...

    def load_seconds(self, num_blocks: int) -> float:
        """How long a load of so many blocks would take if it were asked for now, with the loads before it.

        Of none: until the first news of it.
        """
        ...

    def load(self, load_id: int, names: Sequence[bytes]) -> None:
        """Start staging these blocks, in this order."""
        ...

    def settle(self, load_id: int, num_blocks: int) -> None:
        """A load is over for the scheduler: of what is staged, the first `num_blocks` blocks will be filled in by a
        step, the rest is dropped. With 0 nothing of it is needed any more."""
        ...
