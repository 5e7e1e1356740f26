"""The small parts of the core on their own."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.block_pool import BlockPool
from headstart.core.budget import StepBudget, work_of
from headstart.core.eviction import LeastRecentlyUsed
from headstart.core.radix_cache import RadixCache
from headstart.core.request import Request, SamplingParams
from headstart.core.waiting_queue import WaitingQueue
from tests.core.harness import make_spec


class TestBlockPool:
    def test_ids_come_in_ascending_runs(self) -> None:
        pool = BlockPool(8)
        assert pool.take(3) == [0, 1, 2]
        assert pool.take(2) == [3, 4]

    def test_a_block_is_free_only_after_its_last_reference(self) -> None:
        pool = BlockPool(2)
        (block,) = pool.take(1)
        pool.hold([block])
        assert not pool.drop(block)
        assert pool.drop(block)
        pool.give_back(block)
        assert pool.num_free == 2
        pool.check_invariants(set())

    def test_dropping_too_often_is_noticed(self) -> None:
        with pytest.raises(AssertionError, match="more often"):
            BlockPool(1).drop(0)


class TestRadixCache:
    def test_the_longest_prefix_matches(self) -> None:
        cache = RadixCache(2, LeastRecentlyUsed())
        cache.insert(None, (1, 2), "", 0)
        cache.insert(0, (3, 4), "", 1)
        assert cache.match([1, 2, 3, 4, 5], "", 2) == [0, 1]
        assert cache.match([1, 2, 9, 9], "", 2) == [0]
        assert cache.match([1, 2, 3, 4], "", 1) == [0]
        assert cache.match([1, 2], "other salt", 1) == []

    def test_eviction_takes_the_least_recently_used_leaf(self) -> None:
        cache = RadixCache(1, LeastRecentlyUsed())
        for parent, key, block in [(None, 1, 0), (0, 2, 1), (None, 3, 2)]:
            cache.insert(parent, (key,), "", block)
        for block in (1, 0, 2):
            cache.mark_idle(block)
        cache.mark_reused(2)
        cache.mark_idle(2)
        cache.check_invariants()
        assert [cache.evict() for _ in range(3)] == [1, 0, 2]
        assert len(cache) == 0
        assert cache.match([1], "", 1) == []
        cache.check_invariants()

    def test_the_first_to_index_a_prefix_stays(self) -> None:
        cache = RadixCache(1, LeastRecentlyUsed())
        assert cache.insert(None, (1,), "", 4) == 4
        assert cache.insert(None, (1,), "", 5) == 4
        assert 4 in cache
        assert 5 not in cache


@given(
    start=st.integers(0, 10_000),
    wanted=st.integers(1, 5_000),
    work=st.integers(1, 2_000),
    tokens=st.integers(1, 2_000),
    align=st.sampled_from([1, 16]),
    horizon=st.sampled_from([math.inf, 50.0, 3_000.0]),
)
def test_a_chunk_spends_the_budget_but_never_more(
    start: int, wanted: int, work: int, tokens: int, align: int, horizon: float
) -> None:
    budget = StepBudget(work=work, tokens=tokens, horizon=horizon)
    count = budget.chunk(start, wanted, align)
    assert 1 <= count <= min(wanted, tokens)
    assert count == 1 or work_of(start, count, horizon) <= work * (1 + 1e-9)
    if count < wanted and count > align:
        assert (start + count) % align == 0
    if count < min(wanted, tokens) - align:
        assert work_of(start, count + align + 1, horizon) > work * (1 - 1e-9), "part of the budget was left unused"
    budget.spend(start, count)
    assert budget.tokens == tokens - count


def test_a_spent_budget_buys_nothing() -> None:
    assert StepBudget(work=0, tokens=5, horizon=9).chunk(0, 5, 1) == 0
    assert StepBudget(work=5, tokens=0, horizon=9).chunk(0, 5, 1) == 0


class TestWaitingQueue:
    def make(self, *keys: float) -> tuple[WaitingQueue, list[Request]]:
        queue = WaitingQueue()
        requests = [Request(make_spec(f"r{index}", [1]), 5) for index in range(len(keys))]
        for request, key in zip(requests, keys, strict=True):
            queue.push(request, key)
        return queue, requests

    def test_order_removal_and_rekeying(self) -> None:
        queue, requests = self.make(3, 1, 2)
        assert queue.peek() is requests[1]
        queue.rekey(requests[1], 9)
        queue.rekey(requests[1], 9)
        assert queue.peek() is requests[2]
        queue.remove(requests[2])
        assert queue.peek() is requests[0]
        assert len(queue) == 2
        queue.remove(requests[0])
        queue.remove(requests[1])
        assert queue.peek() is None
        assert queue.rotate() is None

    def test_equal_keys_keep_their_order(self) -> None:
        queue, requests = self.make(1, 1)
        assert queue.peek() is requests[0]

    def test_rotation_reaches_everybody(self) -> None:
        queue, requests = self.make(1, 2, 3)
        assert [queue.rotate() for _ in range(4)] == [*requests, requests[0]]

    def test_rekeying_for_ever_does_not_grow_the_heap(self) -> None:
        queue, requests = self.make(0, 0)
        for key in range(1000):
            queue.rekey(requests[0], key + 1)
        assert len(queue._heap) < 100
        assert queue.peek() is requests[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_p", 5.0),
        ("top_k", -5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("seed", 2**70),
        ("seed", -1),
        ("max_tokens", -1),
        ("logprobs", -1),
    ],
)
def test_sampling_parameters_that_mean_nothing_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{"max_tokens": 1, field: value})  # type: ignore[arg-type]
