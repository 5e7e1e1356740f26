"""Packing of a step: against the layout written out token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.request import SamplingParams
from headstart.core.step import NewRequestData, ScheduledChunk
from headstart.worker.input_batch import GrowingArray, InputBatch

PARAMS = SamplingParams(max_tokens=16)
CPU = torch.device("cpu")


def new(name: str, prompt: tuple[int, ...], **params) -> NewRequestData:
    return NewRequestData(name, prompt, SamplingParams(max_tokens=16, **params))


@settings(deadline=None)
@given(st.data(), st.integers(1, 7))
def test_layout_is_what_it_would_be_token_by_token(data, block_size):
    batch = InputBatch(block_size, num_blocks=1000, vocab_size=1000, device=CPU)
    chunks, states, prompts = [], [], []
    free = data.draw(st.permutations(range(60)))
    for index in range(data.draw(st.integers(1, 5))):
        prompt = tuple(data.draw(st.lists(st.integers(0, 999), min_size=1, max_size=10)))
        start = data.draw(st.integers(0, len(prompt) - 1))
        count = data.draw(st.integers(1, len(prompt) - start))
        num_blocks = -(-(start + count) // block_size) + data.draw(st.integers(0, 2))
        blocks, free = tuple(free[:num_blocks]), free[num_blocks:]
        batch.add(new(str(index), prompt))
        chunk = ScheduledChunk(str(index), start, count, 0, blocks, samples=False)
        states.append(batch.update(chunk))
        chunks.append(chunk)
        prompts.append(prompt)
    inputs = batch.build(chunks, states)

    expected = [
        (prompt[place], place, chunk.block_ids[place // block_size] * block_size + place % block_size)
        for chunk, prompt in zip(chunks, prompts, strict=True)
        for place in range(chunk.start, chunk.start + chunk.num_scheduled_tokens)
    ]
    layout = inputs.layout
    found = zip(inputs.token_ids.tolist(), layout.positions.tolist(), layout.slot_mapping.tolist(), strict=True)
    assert list(found) == expected
    row = 0
    for span, chunk in zip(layout.spans, chunks, strict=True):
        context = chunk.start + chunk.num_scheduled_tokens
        assert (span.first_row, span.num_rows, span.context_len) == (row, chunk.num_scheduled_tokens, context)
        assert span.block_table.tolist() == list(chunk.block_ids[: -(-context // block_size)])
        assert span.block_table.dtype == torch.int64
        row += span.num_rows


def test_block_tables_grow_and_are_replaced():
    batch = InputBatch(4, num_blocks=1000, vocab_size=100, device=CPU)
    batch.add(new("a", tuple(range(20))))

    def table(offset: int, blocks: tuple[int, ...]) -> list[int]:
        return batch.update(ScheduledChunk("a", 0, 1, offset, blocks, False)).block_table.array.tolist()

    assert table(0, (7, 3)) == [7, 3]
    assert table(2, ()) == [7, 3]
    assert table(2, tuple(range(20, 40))) == [7, 3, *range(20, 40)]
    assert table(1, (5,)) == [7, 5]
    assert table(0, (1, 2, 3)) == [1, 2, 3]


@given(st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 99), max_size=40)), max_size=12))
def test_growing_array_is_a_list(replacements):
    array, expected = GrowingArray((1, 2), spare=0), [1, 2]
    for offset, values in replacements:
        offset = min(offset, len(expected))
        array.replace_from(offset, values)
        expected = expected[:offset] + values
        assert array.array.tolist() == expected


def test_sampled_tokens_join_the_request():
    batch = InputBatch(2, num_blocks=1000, vocab_size=100, device=CPU)
    batch.add(new("a", (5, 6, 7)))
    state = batch.update(ScheduledChunk("a", 0, 3, 0, (0, 1, 2), True))
    state.append(42)
    chunk = ScheduledChunk("a", 3, 1, 3, (), True)
    inputs = batch.build([chunk], [batch.update(chunk)])
    assert inputs.token_ids.tolist() == [42]
    assert inputs.layout.positions.tolist() == [3]


@pytest.mark.parametrize(
    ("start", "count", "blocks", "samples"),
    [
        (0, 4, (0, 1), False),
        (3, 1, (0, 1), False),
        (0, 3, (0,), False),
        (0, 2, (0,), True),
        (1, 0, (0,), False),
        (0, 2, (1000,), False),
        (0, 2, (-1,), False),  # blocks that the pool does not have
    ],
)
def test_a_chunk_that_breaks_the_contract_is_caught(start, count, blocks, samples):
    batch = InputBatch(2, num_blocks=1000, vocab_size=100, device=CPU)
    batch.add(new("a", (5, 6, 7)))
    chunk = ScheduledChunk("a", start, count, 0, blocks, samples)
    with pytest.raises(AssertionError):
        batch.build([chunk], [batch.update(chunk)])


def test_ids_outside_the_vocabulary_are_an_error_of_that_request():
    batch = InputBatch(2, num_blocks=1000, vocab_size=100, device=CPU)
    batch.add(new("prompt", (5, 100)))
    batch.add(new("negative", (-1, 5)))
    batch.add(new("bias", (5,), logit_bias=((3, 1.0), (200, 1.0))))
    batch.add(new("fine", (0, 99)))
    errors = {
        name: batch.update(ScheduledChunk(name, 0, 1, 0, (0,), False)).error
        for name in ("prompt", "negative", "bias", "fine")
    }
    assert "100" in errors["prompt"]
    assert "-1" in errors["negative"]
    assert "200" in errors["bias"]
    assert errors["fine"] is None


def test_requests_are_forgotten():
    batch = InputBatch(2, num_blocks=1000, vocab_size=100, device=CPU)
    batch.add(new("a", (1,)))
    batch.add(new("b", (1,)))
    batch.remove("a")
    batch.remove("never seen")
    assert len(batch) == 1
    batch.add(new("a", (1,)))
    batch.clear()
    assert len(batch) == 0
