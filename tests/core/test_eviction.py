"""Who leaves the prefix cache, and that a hot prefix does not: the policy over the real cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headstart.core import eviction
from headstart.core.eviction import AgedFrequency, EvictionPolicy, LeastRecentlyUsed
from headstart.core.kv_cache_manager import KVCacheManager
from headstart.core.request import Request
from tests.core.harness import Driver, make_core, make_spec, prompt


@dataclass
class Cache:
    """One request after the other over the real manager; a block is one token."""

    num_blocks: int
    policy: EvictionPolicy
    kv: KVCacheManager = field(init=False)

    def __post_init__(self) -> None:
        self.kv = KVCacheManager(num_blocks=self.num_blocks, block_size=1, prefix_cache=True, eviction=self.policy)

    def serve(self, *tokens: int) -> int:
        """Serve a prompt of these blocks; returns how many of them were cached."""
        request = Request(make_spec("r", (*tokens, -1)), 100)
        matched = self.kv.match(request)
        assert self.kv.allocate_prompt(request, matched, spare=0)
        self.kv.index(request, len(tokens))
        self.kv.release(request)
        self.kv.check_invariants([])
        return len(matched)

    def cached(self, *tokens: int) -> int:
        return len(self.kv.match(Request(make_spec("r", (*tokens, -1)), 100)))


def test_what_was_asked_for_again_outlasts_what_was_not() -> None:
    cache = Cache(9, AgedFrequency(num_blocks=9))
    for _ in range(3):
        cache.serve(1, 2)
    for one_off in range(100, 116):  # twice what the cache holds
        cache.serve(one_off)
    assert cache.cached(1, 2) == 2


def test_least_recently_used_keeps_nothing_of_it() -> None:
    cache = Cache(9, LeastRecentlyUsed())
    for _ in range(3):
        cache.serve(1, 2)
    for one_off in range(100, 116):
        cache.serve(one_off)
    assert cache.cached(1, 2) == 0


def test_what_was_popular_once_goes_in_the_end() -> None:
    cache = Cache(9, AgedFrequency(num_blocks=9))
    for _ in range(1_000):
        cache.serve(1, 2)
    for one_off in range(100, 400):
        cache.serve(one_off)
    assert cache.cached(1, 2) == 0


def test_uses_are_remembered_beyond_eviction() -> None:
    cache = Cache(9, AgedFrequency(num_blocks=9))
    for first in (100, 200):
        cache.serve(1, 2)
        for one_off in range(first, first + 12):
            cache.serve(one_off)
        assert cache.cached(1, 2) == 0
    assert cache.serve(1, 2) == 0
    for one_off in range(300, 312):
        cache.serve(one_off)
    assert cache.cached(1, 2) == 2, "the third time it is known"


def test_the_memory_of_the_evicted_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "_MAX_GHOSTS", 5)
    policy = AgedFrequency(num_blocks=9)
    cache = Cache(9, policy)
    for one_off in range(100):
        cache.serve(one_off)
    assert len(policy._ghosts) == 5


@pytest.mark.parametrize(("horizon", "survivor"), [(1.0, "long"), (math.inf, "short")])
def test_a_deep_block_is_worth_more_for_it_costs_more(horizon: float, survivor: str) -> None:
    """Used as often, the deep end of a long prompt goes before a short one only where depth costs nothing."""
    cache = Cache(12, AgedFrequency(num_blocks=12, horizon=horizon))
    for _ in range(2):
        cache.serve(*range(1, 9))  # earlier, so first by age
        cache.serve(50, 51)
    cache.serve(100, 101, 102)  # two blocks too many
    whole = {"long": cache.cached(*range(1, 9)) == 8, "short": cache.cached(50, 51) == 2}
    assert whole == {"long": survivor == "long", "short": survivor == "short"}


def test_a_hot_prefix_survives_a_burst_through_the_core() -> None:
    core = make_core(num_blocks=64, block_size=16, chunk=512, max_num_seqs=2)
    driver = Driver.of(core, block_size=16)
    hot = prompt(512)
    for index in range(4):
        driver.add(make_spec(f"hot{index}", [*hot, 6, index], max_tokens=2, arrival=driver.now))
        driver.drain()
    for index in range(16):  # 16 x 128 tokens: twice the pool
        driver.add(make_spec(f"burst{index}", prompt(127, 100 + index), max_tokens=2, arrival=driver.now))
    driver.drain()
    assert core.stats().evicted_blocks > 64
    driver.add(make_spec("again", [*hot, 6, 9], max_tokens=2, arrival=driver.now))
    driver.drain()
    assert driver.finished["again"].num_cached_tokens == 512


class CacheMachine(RuleBasedStateMachine):
    """The manager against a dictionary: prefix (with its salt) -> block, and each block's holders."""

    @initialize(
        num_blocks=st.integers(3, 12),
        size=st.integers(1, 2),
        aged=st.booleans(),
        horizon=st.sampled_from([0.5, 2.0, math.inf]),
    )
    def start(self, num_blocks: int, size: int, aged: bool, horizon: float) -> None:
        policy = AgedFrequency(num_blocks=num_blocks, horizon=horizon) if aged else LeastRecentlyUsed()
        self.kv = KVCacheManager(num_blocks=num_blocks, block_size=size, prefix_cache=True, eviction=policy)
        self.size = size
        self.num_blocks = num_blocks
        self.known: dict[tuple[str, tuple[int, ...]], int] = {}
        self.alive: list[Request] = []
        self.steps: list[int] = []
        self.next_step = 0

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        salt=st.sampled_from(["", "a"]),
        spare=st.integers(0, 1),
    )
    def admit(self, tokens: list[int], salt: str, spare: int) -> None:
        request = Request(make_spec("r", tokens, salt=salt), 100)
        matched = self.kv.match(request)
        assert matched == self._expected(tokens, salt)
        evicted, free = self.kv.num_evicted_blocks, self.kv.num_free_blocks
        if not self.kv.allocate_prompt(request, matched, spare=spare):
            assert (self.kv.num_evicted_blocks, self.kv.num_free_blocks) == (evicted, free)
            return
        new = set(request.block_table[len(matched) :])
        gone = {prefix for prefix, block in self.known.items() if block not in self.kv.radix}
        assert len(gone) == self.kv.num_evicted_blocks - evicted
        assert {self.known[prefix] for prefix in gone} <= new, "no more was evicted than was needed"
        for prefix in gone:
            del self.known[prefix]
        self.alive.append(request)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.alive))
        upto = data.draw(st.integers(0, request.num_tokens))
        self.kv.index(request, upto)
        for end in range(self.size, upto + 1, self.size):
            prefix = (request.spec.cache_salt, tuple(request.token_ids[:end]))
            block = request.block_table[end // self.size - 1]
            assert self.known.setdefault(prefix, block) == block, "a prefix stands once"

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))
        self.kv.release(request)

    @rule()
    def begin_step(self) -> None:
        self.kv.begin_step(self.next_step)
        self.steps.append(self.next_step)
        self.next_step += 1

    @precondition(lambda self: self.steps)
    @rule()
    def retire_step(self) -> None:
        self.kv.retire_step(self.steps.pop(0))

    def _expected(self, tokens: list[int], salt: str) -> list[int]:
        found = []
        for end in range(self.size, len(tokens), self.size):  # never the last token
            block = self.known.get((salt, tuple(tokens[:end])))
            if block is None:
                break
            found.append(block)
        return found

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check_invariants(self.alive)
            assert len(self.kv.radix) == len(self.known)
            assert all(block in self.kv.radix for block in self.known.values())

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            while self.steps:
                self.retire_step()
            for request in self.alive:
                self.kv.release(request)
            self.alive.clear()
            self.holds()
            assert self.kv.num_free_blocks == self.num_blocks


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
