"""Block ids and their reference counts. Owns which ids are free; knows nothing of tokens, tensors or requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class BlockPool:
    """`num_blocks` ids, each free, held (reference count above 0) or idle (count 0, kept by the prefix cache).

    Free ids are handed out in ascending runs as long as nothing was freed, so that a request's blocks tend to be
    consecutive in memory.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def take(self, count: int) -> list[int]:
        """Take `count` free ids, each with one reference. The caller has checked `num_free`."""
        assert 0 <= count <= len(self._free)
        taken = [self._free.popleft() for _ in range(count)]
        for block_id in taken:
            assert self._references[block_id] == 0
            self._references[block_id] = 1
        return taken

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each id."""
        for block_id in block_ids:
            self._references[block_id] += 1

    def drop(self, block_id: int) -> bool:
        """Take one reference away; True when it was the last. The id stays idle until `give_back`."""
        assert self._references[block_id] > 0, f"block {block_id} is dropped more often than held"
        self._references[block_id] -= 1
        return self._references[block_id] == 0

    def give_back(self, block_id: int) -> None:
        """An idle id becomes free."""
        assert self._references[block_id] == 0
        self._free.append(block_id)

    def check_invariants(self, idle: set[int]) -> None:
        """Every id is exactly one of free, held, idle (`idle`: the ids that the prefix cache keeps unreferenced)."""
        free = set(self._free)
        held = {block_id for block_id, count in enumerate(self._references) if count > 0}
        assert len(free) == len(self._free), "an id is free twice"
        assert not free & held
        assert not free & idle
        assert not held & idle
        assert free | held | idle == set(range(self.num_blocks)), "an id is lost"
