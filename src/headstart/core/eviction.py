"""Which idle block of the prefix cache goes next. Owns the order of eviction; knows nothing of requests or block ids.

A policy hears of each node that is inserted, reused, and left idle. A node is always held at least as long as its
descendants, and a request lets go of its blocks deepest first: so whoever is inserted or idle earlier is deeper, and
a policy that never ranks a node below its descendants always finds a leaf at the head of its order, in O(1).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from headstart.core.radix_node import RadixNode

_MAX_USES = 8  # more count as so many, lest what was once popular stay for ever
_GHOSTS_A_BLOCK = 4  # evicted prefixes whose uses are remembered, for each block of the pool
_MAX_GHOSTS = 1 << 20  # about 150 bytes each


class EvictionPolicy(Protocol):
    """No call costs more with more nodes; the order depends on the calls alone."""

    def inserted(self, node: RadixNode) -> None:
        """A node is new in the tree, and held."""
        ...

    def reused(self, node: RadixNode) -> None:
        """A further request holds the node; it may have been idle."""
        ...

    def idle(self, node: RadixNode) -> None:
        """Nobody holds the node any more."""
        ...

    def evict(self) -> RadixNode:
        """Forget the idle node that is worth least, a leaf, and return it. There is one."""
        ...

    def __len__(self) -> int:
        """Idle nodes."""
        ...

    def order(self) -> Iterator[RadixNode]:
        """The idle nodes as they would go if nothing else happened; for tests."""
        ...


class LeastRecentlyUsed:
    """The baseline: whoever is idle longest goes first."""

    def __init__(self) -> None:
        self._idle: OrderedDict[RadixNode, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def inserted(self, node: RadixNode) -> None:
        """Age alone counts."""

    def reused(self, node: RadixNode) -> None:
        self._idle.pop(node, None)

    def idle(self, node: RadixNode) -> None:
        self._idle[node] = None

    def evict(self) -> RadixNode:
        return self._idle.popitem(last=False)[0]

    def order(self) -> Iterator[RadixNode]:
        return iter(self._idle)


class AgedFrequency:
    """Least frequently used, with ageing, by the work that a hit saves, and with a memory of what was evicted.

    An idle block stands at a level: the cache's age, plus 1, plus what its reuses are worth. The lowest level goes
    first, in it the least recently used; the age is the level of the last one to go. So a prompt that nobody repeats
    stands at the age plus 1 and pushes out its like, a block that was reused outlasts several caches full of them, and
    what is no longer asked for is overtaken in the end. (LFU with dynamic ageing: Arlitt et al., 2000, after
    GreedyDual-Size-Frequency.) The n-th reuse is worth n: who came back once may have had its turn, who came back
    thrice is shared. It is worth more the deeper the block, since its tokens attend to all before them; by the
    logarithm, lest long prompts crowd out the many short ones. The uses of an evicted prefix are remembered for a while
    (ghosts, as in 2Q: Johnson and Shasha, 1994), so that one that comes back at long intervals is known in the end.

    A node's level is never below its children's. Args: `num_blocks` of the pool; `horizon`, the position in blocks
    whose tokens cost twice as much as the first one's (`math.inf`: all cost the same).
    """

    def __init__(self, *, num_blocks: int, horizon: float = math.inf) -> None:
        assert horizon > 0
        self._horizon = horizon
        self._max_ghosts = min(_GHOSTS_A_BLOCK * num_blocks, _MAX_GHOSTS)
        self._ghosts: OrderedDict[int, int] = OrderedDict()  # uses by digest
        self._levels: dict[int, OrderedDict[RadixNode, None]] = {}
        self._age = 0
        self._num_idle = 0

    def __len__(self) -> int:
        return self._num_idle

    def inserted(self, node: RadixNode) -> None:
        node.num_uses = self._ghosts.pop(node.digest, 0) + 1

    def reused(self, node: RadixNode) -> None:
        node.num_uses += 1
        level = self._levels.get(node.level)
        if level is not None and node in level:
            del level[node]
            self._num_idle -= 1
            if not level:
                del self._levels[node.level]

    def idle(self, node: RadixNode) -> None:
        # At least its last level: so it stays above children that went idle then and were not used since.
        level = self._age + (1 if node.num_uses == 1 else self._worth(node))
        if level < node.level:
            level = node.level
        else:
            node.level = level
        parent = node.parent
        if parent is not None and parent.level < level:
            parent.level = level
        nodes = self._levels.get(level)
        if nodes is None:
            nodes = self._levels[level] = OrderedDict()
        nodes[node] = None
        self._num_idle += 1

    def evict(self) -> RadixNode:
        while self._age not in self._levels:  # nobody is below the age, nor far above it
            self._age += 1
        level = self._levels[self._age]
        node, _ = level.popitem(last=False)
        self._num_idle -= 1
        if not level:
            del self._levels[self._age]
        self._ghosts[node.digest] = node.num_uses
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)
        return node

    def order(self) -> Iterator[RadixNode]:
        for level in sorted(self._levels):
            yield from self._levels[level]

    def _worth(self, node: RadixNode) -> int:
        """In levels: 1 for a block that nobody reused yet."""
        reuses = min(node.num_uses, _MAX_USES) - 1
        return 1 + reuses * (reuses + 1) // 2 * int(1 + node.depth / self._horizon).bit_length()
