"""RamTier: blocks in the host's memory, for accelerators whose own is smaller. What it gives up may go to disk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class RamTier:
    """Args: `max_bytes` of all blocks; `on_full`: told of each block that has to go, used longest ago first.

    `put` and `read` may be called from one thread each; `in` and `len` from any.
    """

    kind = "ram"
    is_off = False  # memory does not fail

    def __init__(self, max_bytes: int, on_full: Callable[[bytes, memoryview], None] | None = None) -> None:
        self._max_bytes = max_bytes
        self._on_full = on_full or (lambda name, content: None)
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(self, name: bytes, content: memoryview) -> None:
        if name in self._blocks:
            return
        self._blocks[name] = bytes(content)
        self._num_bytes += len(content)
        while self._num_bytes > self._max_bytes:
            old, block = self._blocks.popitem(last=False)
            self._num_bytes -= len(block)
            self._on_full(old, memoryview(block))

    def read(self, name: bytes, into: memoryview) -> bool:
        """Fetch a block; False when it is not there (any more)."""
        block = self._blocks.get(name)
        if block is None:
            return False
        into[:] = block
        if name in self._blocks:
            self._blocks.move_to_end(name)
        return True

    def close(self) -> None:
        """Hand everything on."""
        while self._blocks:
            old, block = self._blocks.popitem(last=False)
            self._on_full(old, memoryview(block))
        self._num_bytes = 0
