"""A tier without a disk: keeps what the fake worker's slots hold; a test says how far a load comes, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headstart.core.chain import names
from headstart.core.connector import KVArrival, TierState
from headstart.core.step import BlockFill, BlockSave

Slot = tuple[str, tuple[int, ...]]


@dataclass
class FakeTier:
    """Implements `KVConnector`. `seconds_per_block`, `seconds_to_news`: what it says of them. `loads`: under way."""

    block_size: int
    seconds_per_block: float = 0.0
    seconds_to_news: float = 0.0
    stored: dict[bytes, list[Slot]] = field(default_factory=dict)
    loads: dict[int, list[bytes]] = field(default_factory=dict)
    staged: dict[int, list[list[Slot]]] = field(default_factory=dict)
    num_dropped_blocks: int = 0

    def tier_states(self) -> tuple[TierState, ...]:
        return (TierState("ram", True, len(self.stored), 0),)

    def match(self, names: Sequence[bytes]) -> int:
        return next((index for index, name in enumerate(names) if name not in self.stored), len(names))

    def stores(self, name: bytes) -> bool:
        return name in self.stored

    def load_seconds(self, num_blocks: int) -> float:
        return self.seconds_to_news + num_blocks * self.seconds_per_block

    def load(self, load_id: int, names: Sequence[bytes]) -> None:
        assert load_id not in self.loads
        assert names
        self.loads[load_id] = list(names)
        self.staged[load_id] = [self.stored[name] for name in names]

    def settle(self, load_id: int, num_blocks: int) -> None:
        del self.loads[load_id]
        if not num_blocks:
            del self.staged[load_id]

    def all_arrived(self) -> list[KVArrival]:
        return [KVArrival(load_id, len(names), True) for load_id, names in self.loads.items()]

    def save(self, saves: Sequence[BlockSave], slots: dict[tuple[int, int], Slot]) -> None:
        """As a worker does it at the beginning of a step: the block must hold the very prefix that its name says."""
        for block_id, name in saves:
            held = [slots[block_id, index] for index in range(self.block_size)]
            salt, prefix = held[-1]
            assert [len(tokens) % self.block_size for _, tokens in held] == [*range(1, self.block_size), 0]
            assert name == names(salt, prefix, self.block_size, len(prefix) // self.block_size)[-1]
            self.stored[name] = held

    def fill(self, fills: Sequence[BlockFill], slots: dict[tuple[int, int], Slot]) -> None:
        for load_id, block_ids in fills:
            for held, block_id in zip(self.staged.pop(load_id), block_ids, strict=False):
                if block_id >= 0:
                    for index, slot in enumerate(held):
                        slots[block_id, index] = slot
