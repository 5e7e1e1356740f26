"""The warm-up's steps keep the scheduler's promises, whatever the pool's size."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from headstart.worker.warmup import warmup_steps


def steps(**changes):
    sizes = {"num_blocks": 400, "block_size": 16, "max_model_len": 2048, "max_chunk": 512, "mixed_chunk": 128}
    return list(warmup_steps(**{**sizes, "max_num_seqs": 64, **changes}))


def is_consecutive(blocks):
    return all(after - before == 1 for before, after in pairwise(blocks))


def test_every_shape_class_is_there():
    found = steps()
    sizes = [{chunk.num_scheduled_tokens for chunk in step.chunks} for step in found]
    assert {512} in sizes  # full chunk
    assert {1, 3, 117} in sizes  # eight decodes, a prompt that is asked about, and a chunk: 128 tokens
    assert {len(step.chunks) for step in found if {c.num_scheduled_tokens for c in step.chunks} == {1}} == {
        1, 2, 8, 32,
    }  # fmt: skip
    params = [new.params for step in found for new in step.new_requests]
    assert {each.temperature > 0 for each in params} == {True, False}
    assert any(each.logprobs is not None for each in params)
    assert any(each.top_k for each in params)
    assert any(each.top_p < 1 for each in params)


def test_contexts_longer_than_a_chunk_and_scattered_blocks_are_there():
    tables: dict[str, tuple[int, ...]] = {}
    seen = []
    for chunk in [chunk for step in steps() for chunk in step.chunks]:
        tables[chunk.request_id] = (*tables.get(chunk.request_id, ())[: chunk.block_offset], *chunk.block_ids)
        seen.append((chunk.num_scheduled_tokens, chunk.start, tables[chunk.request_id]))
    for size in (1, 512):
        assert any(count == size and start >= 512 and not is_consecutive(table) for count, start, table in seen)
    assert any(count > 100 and len(table) > 1 and is_consecutive(table) for count, _, table in seen)


def test_prompt_logprobs_are_computed_at_least_once():
    found = steps()
    asking = {new.request_id for step in found for new in step.new_requests if new.params.prompt_logprobs is not None}
    assert any(chunk.request_id in asking and chunk.start + 1 < 3 for step in found for chunk in step.chunks)


def test_few_steps_and_tokens_because_the_start_waits_for_them():
    found = steps()
    assert len(found) <= 10
    assert sum(chunk.num_scheduled_tokens for step in found for chunk in step.chunks) <= 512 + 128 + 64


def test_no_batch_is_larger_than_configured():
    assert max(len(step.chunks) for step in steps(max_num_seqs=5)) <= 5 + 2
    assert {len(step.chunks) for step in steps(max_num_seqs=5)[4:]} == {5, 2, 0}


@given(
    num_blocks=st.integers(1, 40),
    block_size=st.integers(1, 20),
    max_model_len=st.integers(2, 300),
    max_chunk=st.integers(1, 200),
    mixed_chunk=st.integers(1, 50),
    max_num_seqs=st.integers(1, 70),
)
def test_steps_fit_the_pool_and_end_clean(**sizes):
    assume(sizes["num_blocks"] * sizes["block_size"] >= 2)
    known: dict[str, int] = {}
    blocks: dict[str, tuple[int, ...]] = {}
    num_decodes = 0
    for step in steps(**sizes):
        for name in step.finished_request_ids:
            del known[name], blocks[name]
        known.update({new.request_id: len(new.prompt_token_ids) for new in step.new_requests})
        for chunk in step.chunks:
            blocks[chunk.request_id] = (*blocks.get(chunk.request_id, ())[: chunk.block_offset], *chunk.block_ids)
        used = [block for table in blocks.values() for block in table]
        assert len(set(used)) == len(used)
        assert all(0 <= block < sizes["num_blocks"] for block in used)
        for chunk in step.chunks:
            end = chunk.start + chunk.num_scheduled_tokens
            assert 0 <= chunk.start < end == known[chunk.request_id] <= sizes["max_model_len"]
            assert end <= len(blocks[chunk.request_id]) * sizes["block_size"]
            assert chunk.samples
            known[chunk.request_id] += 1
            num_decodes += chunk.num_scheduled_tokens == 1 and chunk.start > 0
        assert step.chunks or step.finished_request_ids
    assert not known
    assert num_decodes
