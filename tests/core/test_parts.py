"""The small parts of the core on their own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.block_pool import BlockPool
from headstart.core.budget import StepBudget
from headstart.core.cost import LinearCosts, StepWork
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
        assert [cache.evict().block_id for _ in range(3)] == [1, 0, 2]
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
    seconds=st.floats(0, 3),
    tokens=st.integers(1, 2_000),
    align=st.sampled_from([1, 16]),
    context=st.sampled_from([0, 1e-6, 1e-4]),
    decodes=st.integers(0, 20),
)
def test_a_chunk_takes_the_time_that_a_step_may_take_but_not_more(
    start: int, wanted: int, seconds: float, tokens: int, align: int, context: float, decodes: int
) -> None:
    costs = LinearCosts(step=0.01, prefill_token=1e-3, prefill_context=context, decode=0.01)
    before = StepWork(num_decodes=decodes)
    budget = StepBudget(costs, before, seconds=seconds, tokens=tokens)
    count = budget.chunk(start, wanted, align, samples=True)
    assert 1 <= count <= min(wanted, tokens)
    takes = [costs.step_seconds(before.with_prefill(start, each, True)) for each in (count, count + align)]
    assert takes[0] <= seconds or count <= align, "a step goes on, by a block at least"
    assert takes[1] > seconds or count > min(wanted, tokens) - align, "time was left unused"
    if align < count < wanted:
        assert (start + count) % align == 0
    budget.spend(start, count, samples=False)
    assert budget.tokens == tokens - count
    more = budget.chunk(0, 1_000, align, samples=True)
    assert more == 0 or costs.step_seconds(budget.work.with_prefill(0, more, True)) <= seconds


def test_no_tokens_are_left() -> None:
    assert StepBudget(LinearCosts(), StepWork(), seconds=1, tokens=0).chunk(0, 5, 1, samples=True) == 0


@pytest.mark.parametrize(("step", "more"), [(0.001, 0), (0.0101, 19), (1.0, 100)])
def test_a_step_that_yields_a_first_token_ends_with_it_unless_it_is_short(step: float, more: int) -> None:
    costs = LinearCosts(step=step, prefill_token=1e-3)
    budget = StepBudget(costs, StepWork(), seconds=2.0, tokens=1000)
    assert budget.chunk(0, 15, 1, samples=True) == 15
    budget.spend(0, 15, samples=True)
    # Four of the shortest steps, with one token each, less the step itself and the first chunk.
    assert budget.chunk(0, 100, 1, samples=True) == more


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

    def test_who_is_set_aside_is_passed_over_and_keeps_its_place(self) -> None:
        queue, requests = self.make(1, 2)
        queue.set_aside(requests[0])
        assert queue.peek() is requests[1]
        queue.rekey(requests[0], 7)
        queue.bring_back(requests[0])
        assert queue.peek() is requests[0]
        queue.set_aside(requests[1])
        queue.remove(requests[1])
        assert len(queue) == 1
        queue.check_invariants()


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
