"""The only cache API that the scheduler sees: match, allocate, index, release. Joins `BlockPool` and `RadixCache`.

A block leaves a request in two moves: the request stops using it (`release`), and, when the last step in flight at that
time has retired (`retire_step`), its reference is dropped. So no step ever writes into a block that was handed on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from headstart.core.block_pool import BlockPool
from headstart.core.eviction import EvictionPolicy
from headstart.core.radix_cache import RadixCache, name_of
from headstart.core.request import Request
from headstart.core.step import BlockSave


class KVCacheManager:
    """Block tables of requests over one pool, with prefix reuse when `prefix_cache`.

    Args: `num_blocks` in the pool, `block_size` in tokens; `eviction`: who leaves the prefix cache for new blocks;
    `saves`: somebody keeps what leaves it.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, prefix_cache: bool, eviction: EvictionPolicy, saves: bool = False
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.radix = RadixCache(block_size, eviction)
        self._prefix_cache = prefix_cache
        self._saves: list[BlockSave] | None = [] if saves else None
        self._steps: deque[tuple[int, list[int]]] = deque()  # steps in flight, with what each releases when it retires

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now: never used, given back, or idle in the cache."""
        return self.pool.num_free + self.radix.num_idle

    @property
    def num_cached_blocks(self) -> int:
        return len(self.radix)

    @property
    def num_evicted_blocks(self) -> int:
        """Since the start."""
        return self.radix.num_evicted

    @property
    def num_releasing_blocks(self) -> int:
        """Blocks that nobody holds but steps in flight: they can be allocated once those retire."""
        waiting = Counter(block_id for _, released in self._steps for block_id in released)
        return sum(self.pool.references(block_id) == count for block_id, count in waiting.items())

    def matches(self, request: Request) -> bool:
        """It may use cached blocks at all: prompt log-probabilities need every row computed."""
        return self._prefix_cache and request.spec.params.prompt_logprobs is None

    def match(self, request: Request) -> list[int]:
        """Cached blocks of the longest prefix of what the request must compute; its last token is never part of it."""
        if not self.matches(request):
            return []
        return self.radix.match(request.token_ids, request.spec.cache_salt, (request.num_tokens - 1) // self.block_size)

    def allocate_prompt(self, request: Request, matched: Sequence[int], *, spare: int) -> bool:
        """Give a request without blocks its whole table: `matched`, then new blocks for every token known now.

        All or nothing: False, with nothing changed, unless `spare` allocatable blocks would be left. Allocating all at
        once is what keeps half-done prefills from blocking each other.
        """
        assert not request.block_table
        needed = self._blocks_for(request.num_tokens) - len(matched)
        idle_matched = sum(1 for block_id in matched if self.pool.references(block_id) == 0)
        if self.num_free_blocks - idle_matched < needed + spare:
            return False
        self._hold(matched)
        request.block_table = [*matched, *self._take(needed)]
        request.num_indexed_blocks = len(matched)
        request.num_sent_blocks = 0
        request.num_computed_tokens = len(matched) * self.block_size
        return True

    def allocate_one(self, request: Request) -> bool:
        """One more block for a request whose table is full; False, with nothing changed, when none can be had."""
        if self.num_free_blocks == 0:
            return False
        request.block_table.extend(self._take(1))
        return True

    def index(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` of the request are computed: make its full blocks among them findable.

        Where another request indexed the same prefix first, the request's own copy is released and its table points to
        the indexed block from then on.
        """
        size, table = self.block_size, request.block_table
        if not self._prefix_cache:
            return
        for index in range(request.num_indexed_blocks, num_tokens // size):
            key = tuple(request.token_ids[index * size : (index + 1) * size])
            parent = table[index - 1] if index else None
            standing = self.radix.insert(parent, key, request.spec.cache_salt, table[index])
            if standing != table[index]:
                self._hold((standing,))
                self._release((table[index],))
                table[index] = standing
                request.num_sent_blocks = min(request.num_sent_blocks, index)
            request.num_indexed_blocks = index + 1

    def release(self, request: Request) -> None:
        """The request lets go of all its blocks, the deepest first. What is indexed stays matchable until evicted."""
        blocks, request.block_table = request.block_table, []
        request.num_indexed_blocks = request.num_sent_blocks = 0
        self._release(reversed(blocks))

    def begin_step(self, step_id: int) -> None:
        self._steps.append((step_id, []))

    def retire_step(self, step_id: int) -> None:
        """The oldest step in flight is done: drop what was released while it was the newest."""
        oldest, released = self._steps.popleft()
        assert oldest == step_id, "steps retire in order"
        self._drop(released)

    def take_saves(self) -> list[BlockSave]:
        """What left the prefix cache since the last call: its content is there until the next step."""
        if not self._saves:
            return []
        saves, self._saves = self._saves, []
        return saves

    def cached(self) -> list[BlockSave]:
        """All that is in the prefix cache, that first which is worth most."""
        return [BlockSave(node.block_id, name_of(node)) for node in self.radix.nodes()]

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _release(self, block_ids: Iterable[int]) -> None:
        if self._steps:
            self._steps[-1][1].extend(block_ids)
        else:
            self._drop(block_ids)

    def _drop(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if self.pool.drop(block_id):
                if block_id in self.radix:
                    self.radix.mark_idle(block_id)
                else:
                    self.pool.give_back(block_id)

    def _hold(self, block_ids: Sequence[int]) -> None:
        self.pool.hold(block_ids)
        for block_id in block_ids:
            self.radix.mark_reused(block_id)

    def _take(self, count: int) -> list[int]:
        while self.pool.num_free < count:
            node = self.radix.evict()
            if self._saves is not None:
                self._saves.append(BlockSave(node.block_id, name_of(node)))
            self.pool.give_back(node.block_id)
        return self.pool.take(count)

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """References equal the uses by `requests` (all that are alive) and by releases that wait for a step."""
        uses = [0] * self.pool.num_blocks
        for request in requests:
            assert len(set(request.block_table)) == len(request.block_table)
            for index, block_id in enumerate(request.block_table):
                uses[block_id] += 1
                assert (index < request.num_indexed_blocks) <= (block_id in self.radix)
        for _, released in self._steps:
            for block_id in released:
                uses[block_id] += 1
        assert uses == [self.pool.references(block_id) for block_id in range(self.pool.num_blocks)]
        self.pool.check_invariants(set(self.radix.idle_blocks()))
        self.radix.check_invariants()
