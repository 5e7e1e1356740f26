"""The sweep's steps keep the scheduler's promises, say truly what work is in them, and cover what is to be learned."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from headstart.core.cost import StepWork
from headstart.worker.sweep import SweepLimits, sweep_steps

LIMITS = SweepLimits(num_blocks=2000, block_size=16, max_model_len=2048, max_num_batched_tokens=512, max_num_seqs=32)


def take(limits, count, seed=0, may_take=lambda work: True):
    return list(itertools.islice(sweep_steps(limits, random.Random(seed), may_take), count))


def work_of(step, known):
    work = StepWork()
    for chunk in step.chunks:
        if chunk.num_scheduled_tokens == 1 and chunk.request_id.startswith("decode"):
            work = work._replace(
                num_decodes=work.num_decodes + 1,
                decode_context=work.decode_context + chunk.start + 1,
                num_samples=work.num_samples + 1,
            )
        else:
            work = work.with_prefill(chunk.start, chunk.num_scheduled_tokens, chunk.samples)
    return work


@given(
    num_blocks=st.integers(1, 60),
    block_size=st.integers(1, 20),
    max_model_len=st.integers(2, 300),
    max_num_batched_tokens=st.integers(2, 100),
    max_num_seqs=st.integers(1, 40),
    seed=st.integers(0, 99),
    longest=st.integers(1, 300),
)
def test_steps_fit_the_pool_and_the_limits_and_say_what_they_hold(seed, longest, **sizes):
    if sizes["num_blocks"] * sizes["block_size"] < 2:
        return
    sizes["max_num_batched_tokens"] = max(sizes["max_num_batched_tokens"], sizes["max_num_seqs"] + 1)
    limits = SweepLimits(**sizes)
    known: dict[str, int] = {}
    tables: dict[str, tuple[int, ...]] = {}
    timed = 0

    def may_take(work):
        return work.num_prefill_tokens + work.num_decodes <= longest

    for step, work in take(limits, 60, seed, may_take):
        for name in step.finished_request_ids:
            del known[name], tables[name]
        for new in step.new_requests:
            assert new.request_id not in known
            known[new.request_id] = len(new.prompt_token_ids)
        for chunk in step.chunks:
            before = tables.get(chunk.request_id, ())
            assert chunk.block_offset <= len(before)
            tables[chunk.request_id] = table = (*before[: chunk.block_offset], *chunk.block_ids)
            end = chunk.start + chunk.num_scheduled_tokens
            assert 0 <= chunk.start < end == known[chunk.request_id] <= limits.max_model_len
            assert end <= len(table) * limits.block_size
            known[chunk.request_id] += chunk.samples
        used = [block for table in tables.values() for block in table]
        assert len(set(used)) == len(used)
        assert all(0 <= block < limits.num_blocks for block in used)
        assert len({chunk.request_id for chunk in step.chunks}) == len(step.chunks)
        if work is not None:
            timed += 1
            assert step.chunks
            assert work == work_of(step, known)
            assert step.num_scheduled_tokens <= limits.max_num_batched_tokens
            assert work.num_decodes <= limits.max_num_seqs
            if work.num_prefill_tokens > 1 and work.num_prefills == 1:
                assert may_take(work)
    assert timed


def test_all_kinds_of_work_are_in_it_and_each_number_varies():
    works = [work for _, work in take(LIMITS, 300) if work is not None]
    kinds = [(bool(work.num_prefills), bool(work.num_decodes)) for work in works]
    for kind in ((True, False), (False, True), (True, True)):
        assert kinds.count(kind) >= 40
    assert {work.num_prefills for work in works} == {0, 1, 2}
    for numbers in zip(*works, strict=True):
        assert len(set(numbers)) >= 3
    assert min(work.num_decodes for work in works if work.num_decodes) <= 2
    assert max(work.num_decodes for work in works) >= 24
    assert any(work.num_prefills and work.num_samples == work.num_decodes for work in works), "no chunk ends early"


def test_decodes_come_after_their_worker_knows_them():
    for step, work in take(LIMITS, 300):
        if work is not None:
            assert not any(new.request_id.startswith("decode") for new in step.new_requests)


def test_long_steps_are_not_taken():
    works = [work for _, work in take(LIMITS, 300, may_take=lambda work: work.num_prefill_tokens <= 64) if work]
    assert max(work.num_prefill_tokens for work in works) <= 64
    assert max(work.num_prefill_tokens for _, work in take(LIMITS, 300) if work) > 256


def test_chance_is_the_seeds():
    assert take(LIMITS, 50, seed=3) == take(LIMITS, 50, seed=3) != take(LIMITS, 50, seed=4)
