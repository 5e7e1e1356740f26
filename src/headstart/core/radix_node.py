"""A node of the prefix index. Owned and changed by `RadixCache` and its eviction policy only."""

from __future__ import annotations

import zlib

BlockKey = tuple[int, ...]


class RadixNode:
    """One cached block: its tokens, its place in the tree, its id. A root has no parent and stands for its salt.

    `depth`: blocks before it in its prefix. `digest` stands for the whole prefix, salt included; two prefixes may share
    one by chance, so only a policy may rely on it. `num_uses` and `level` belong to the eviction policy.
    `name` is the prefix' (`core.chain`), once it was asked for.
    """

    __slots__ = ("block_id", "children", "depth", "digest", "key", "level", "name", "num_uses", "parent", "salt")

    def __init__(self, key: BlockKey, parent: RadixNode | None, block_id: int, salt: str) -> None:
        self.salt = salt
        self.key = key
        self.parent = parent
        self.block_id = block_id
        self.children: dict[BlockKey, RadixNode] = {}
        self.num_uses = self.level = 0
        self.name: bytes | None = None
        if parent is None:
            self.depth = -1
            self.digest = zlib.crc32(salt.encode("utf-8", "surrogatepass"))  # `hash` of a text differs in every process
        else:
            self.depth = parent.depth + 1
            self.digest = hash((parent.digest, key))
