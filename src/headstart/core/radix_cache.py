"""The prefix index: a tree over full blocks. Owns which block holds which prefix; who goes is its policy's choice.

Knows nothing of requests or reference counts: `KVCacheManager` tells it when a node becomes idle or held.
Idea: RadixAttention (Zheng et al., SGLang, 2024), here with one node a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headstart.core.chain import next_name, root_name
from headstart.core.eviction import EvictionPolicy
from headstart.core.radix_node import BlockKey, RadixNode


class RadixCache:
    """Prefix tree keyed by the tokens of whole blocks, one root for each isolation key (`salt`).

    Idle nodes (no request holds them) stay until `eviction` gives them up, always a leaf: a node is held at least as
    long as its descendants, and a request's blocks become idle deepest first.
    """

    def __init__(self, block_size: int, eviction: EvictionPolicy) -> None:
        assert block_size > 0
        self.block_size = block_size
        self._roots: dict[str, RadixNode] = {}
        self._nodes: dict[int, RadixNode] = {}  # by block id
        self._eviction = eviction
        self.num_evicted = 0  # since the start

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._nodes

    @property
    def num_idle(self) -> int:
        return len(self._eviction)

    def match(self, token_ids: Sequence[int], salt: str, max_blocks: int) -> list[int]:
        """Block ids of the longest cached prefix of `token_ids`, at most `max_blocks` of them. Changes nothing."""
        node = self._roots.get(salt)
        matched: list[int] = []
        if node is None:
            return matched
        size = self.block_size
        for start in range(0, max_blocks * size, size):
            node = node.children.get(tuple(token_ids[start : start + size]))
            if node is None:
                break
            matched.append(node.block_id)
        return matched

    def insert(self, parent_block: int | None, key: BlockKey, salt: str, block_id: int) -> int:
        """Index `block_id` under `parent_block` (None: at the root) and return the id that now stands for this prefix.

        That is `block_id`, or, if another block with the same prefix is indexed already, that one.
        """
        assert len(key) == self.block_size
        if parent_block is None:
            root = self._roots.get(salt)
            parent = self._roots[salt] = RadixNode((), None, -1, salt) if root is None else root
        else:
            parent = self._nodes[parent_block]
        node = RadixNode(key, parent, block_id, salt)
        standing = parent.children.setdefault(key, node)  # a key is hashed anew each time: look it up once
        if standing is node:
            assert block_id not in self._nodes
            self._nodes[block_id] = node
            self._eviction.inserted(node)
        return standing.block_id

    def mark_idle(self, block_id: int) -> None:
        """Nobody holds this block any more: it may be evicted."""
        self._eviction.idle(self._nodes[block_id])

    def mark_reused(self, block_id: int) -> None:
        """One more holds this block, idle or not."""
        self._eviction.reused(self._nodes[block_id])

    def evict(self) -> RadixNode:
        """Forget the idle block that is worth least and return it. The caller has checked `num_idle`."""
        node = self._eviction.evict()
        assert not node.children, "a block was to go before its descendants"
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        del self._nodes[node.block_id]
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]
        self.num_evicted += 1
        return node

    def nodes(self) -> list[RadixNode]:
        """All that is cached, parents before their children, those first that are worth most."""
        idle = [self._nodes[block_id] for block_id in self.idle_blocks()]
        held = self._nodes.keys() - {node.block_id for node in idle}
        return [*sorted([self._nodes[block_id] for block_id in held], key=lambda node: node.depth), *reversed(idle)]

    def idle_blocks(self) -> Iterator[int]:
        """As they would be evicted if nothing else happened."""
        return (node.block_id for node in self._eviction.order())

    def check_invariants(self) -> None:
        """The tree, the index by block id and the eviction queue agree."""
        seen: set[int] = set()
        stack = list(self._roots.values())
        for root in stack:
            assert root.children, "an empty root was kept"
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                assert child.parent is node
                assert child.key == key
                assert len(key) == self.block_size
                assert self._nodes[child.block_id] is child
                seen.add(child.block_id)
                stack.append(child)
        assert seen == set(self._nodes)
        position = {block_id: index for index, block_id in enumerate(self.idle_blocks())}
        assert len(position) == self.num_idle
        for block_id, index in position.items():
            for child in self._nodes[block_id].children.values():
                assert child.block_id in position, "an idle block has a held child"
                assert position[child.block_id] < index, "a block would be evicted before its descendants"


def name_of(node: RadixNode) -> bytes:
    """The name of a node's prefix; also of one that was just evicted. Kept, with those of the nodes above it."""
    above: list[RadixNode] = []
    at: RadixNode | None = node
    while at is not None and at.name is None:
        above.append(at)
        at = at.parent
    name = b"" if at is None or at.name is None else at.name
    for below in reversed(above):
        name = below.name = root_name(below.salt) if below.parent is None else next_name(name, below.key)
    return name
