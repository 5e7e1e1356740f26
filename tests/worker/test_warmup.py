"""The warm-up's steps keep the scheduler's promises, whatever the pool's size."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from headstart.worker.warmup import warmup_steps


def steps(**changes):
    sizes = {"num_blocks": 400, "block_size": 16, "max_model_len": 2048, "max_chunk": 512, "mixed_chunk": 128}
    return list(warmup_steps(**{**sizes, "max_num_seqs": 64, **changes}))


def test_every_shape_class_is_there():
    found = steps()
    sizes = [{chunk.num_scheduled_tokens for chunk in step.chunks} for step in found]
    assert {512} in sizes  # full chunk
    assert {1} in sizes  # decode alone
    assert any(step_sizes >= {1, 120} for step_sizes in sizes)  # eight decodes and a chunk
    decodes = {sum(chunk.start > 0 for chunk in step.chunks) for step in found}
    assert decodes >= {1, 2, 4, 8}
    params = [new.params for step in found for new in step.new_requests]
    assert {each.temperature > 0 for each in params} == {True, False}
    assert any(each.logprobs is not None for each in params)
    assert any(each.top_k for each in params)
    assert any(each.top_p < 1 for each in params)


@given(
    num_blocks=st.integers(1, 40),
    block_size=st.integers(1, 20),
    max_model_len=st.integers(2, 300),
    max_chunk=st.integers(1, 200),
    mixed_chunk=st.integers(1, 50),
    max_num_seqs=st.integers(1, 12),
)
def test_steps_fit_the_pool_and_end_clean(**sizes):
    assume(sizes["num_blocks"] * sizes["block_size"] >= 2)
    live: dict[str, int] = {}
    for step in steps(**sizes):
        for name in step.finished_request_ids:
            del live[name]
        live.update({new.request_id: len(new.prompt_token_ids) for new in step.new_requests})
        used = [block for chunk in step.chunks for block in chunk.block_ids]
        assert len(set(used)) == len(used)
        assert all(0 <= block < sizes["num_blocks"] for block in used)
        for chunk in step.chunks:
            end = chunk.start + chunk.num_scheduled_tokens
            assert end == live[chunk.request_id] + (chunk.start > 0)
            assert end < sizes["max_model_len"] or (chunk.start > 0 and end <= sizes["max_model_len"])
            assert end <= len(chunk.block_ids) * sizes["block_size"]
        assert step.chunks or step.finished_request_ids
    assert not live
