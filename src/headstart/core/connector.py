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


class KVConnector(Protocol):
    """Names are those of `core.chain`."""

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
