"""The exactness promise at its root: a request's logits are bit-equal whatever the chunks, the batch and the blocks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstart.models import Decoder
from headstart.ops import HeadShape
from tests.models.tiny import VOCAB, chunked_logits, layout, load, pool_for, reference

BLOCK = 16
NUM_BLOCKS = 120
LENGTH = 620  # past one key tile of 512


@dataclass(frozen=True)
class Known:
    """A model, a request, and its logits when computed whole and alone."""

    decoder: Decoder
    ids: Tensor
    logits: Tensor


@pytest.fixture(scope="module", params=[("llama", 8, 1), ("qwen3", 64, 3), ("qwen2", 20, 4)], ids=str)
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    family, head_dim, group = request.param
    overrides: dict[str, Any] = {"head_dim": head_dim, "num_attention_heads": 2 * group, "hidden_size": 24 * group}
    folder = tmp_path_factory.mktemp("model")
    reference(family, max_position_embeddings=1024, **overrides).save_pretrained(folder)
    decoder = load(folder)
    ids = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(2))
    blocks = list(range(-(-LENGTH // BLOCK)))
    logits = chunked_logits(decoder, ids, [LENGTH], blocks, BLOCK, pool_for(decoder, NUM_BLOCKS, BLOCK))
    return Known(decoder, ids, logits)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_rows_are_bit_equal_in_any_chunks_and_blocks(known: Known, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, LENGTH))
    largest = data.draw(st.sampled_from([1, 3, 16, 64, 300, LENGTH]))
    length = min(length, 40 * largest)
    sizes = data.draw(st.lists(st.integers(1, largest), min_size=length, max_size=length))
    first = data.draw(st.integers(0, NUM_BLOCKS - 40))
    blocks = list(range(first, first + 39))
    if data.draw(st.booleans()):
        blocks = data.draw(st.permutations(range(NUM_BLOCKS)))[:39]
    got = chunked_logits(
        known.decoder, known.ids[:length], sizes, blocks, BLOCK, pool_for(known.decoder, NUM_BLOCKS, BLOCK)
    )
    assert torch.equal(got, known.logits[:length])


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_rows_are_bit_equal_in_any_company(known: Known, data: st.DataObject) -> None:
    """Several requests with the same tokens at different places go through one step each time."""
    decoder = known.decoder
    pool = pool_for(decoder, NUM_BLOCKS, BLOCK)
    num_requests = data.draw(st.integers(2, 9))
    per_request = NUM_BLOCKS // num_requests
    limit = min(LENGTH, per_request * BLOCK)
    order = data.draw(st.permutations(range(NUM_BLOCKS)))
    tables = [order[i * per_request : (i + 1) * per_request] for i in range(num_requests)]
    done = [0] * num_requests
    for _ in range(4):
        wanted = data.draw(
            st.lists(st.sampled_from([0, 1, 1, 2, 7, 40, 190]), min_size=num_requests, max_size=num_requests)
        )
        chunks = [
            (done[i], min(size, limit - done[i]), tables[i])
            for i, size in enumerate(wanted)
            if min(size, limit - done[i])
        ]
        if not chunks:
            continue
        ids = torch.cat([known.ids[start : start + size] for start, size, _ in chunks])
        expected = torch.cat([known.logits[start : start + size] for start, size, _ in chunks])
        got = decoder.logits(decoder.forward(ids, layout(chunks, BLOCK), pool))
        assert torch.equal(got, expected)
        done = [done[i] + min(size, limit - done[i]) for i, size in enumerate(wanted)]


@pytest.mark.parametrize("block_size", [1, 3, 32, 100])
def test_rows_are_bit_equal_for_any_block_size(known: Known, block_size: int) -> None:
    num_blocks = -(-LENGTH // block_size)
    blocks = [*range(1, num_blocks), 0]
    pool = pool_for(known.decoder, num_blocks, block_size)
    got = chunked_logits(known.decoder, known.ids, (200, 1, 400, 19), blocks, block_size, pool)
    assert torch.equal(got, known.logits)


def test_what_is_not_finite_in_one_request_stays_there(known: Known) -> None:
    """A request whose own values overflow must not reach its neighbours through masked padding."""
    decoder = known.decoder
    pool = pool_for(decoder, 4, BLOCK)
    heads = HeadShape(decoder.spec.num_heads, decoder.spec.num_kv_heads, decoder.spec.head_dim)
    qkv = torch.full((BLOCK, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim), torch.nan)
    qkv[::2] = torch.inf
    for rows in (BLOCK, 1):
        with torch.inference_mode():
            poisoned = decoder.attention_step(layout([(0, rows, [1])], BLOCK), pool)
            poisoned.rotate_and_write(qkv[:rows], pool.layers[0], rotate=True, qk_norm=None)
    assert bool(pool.data.view(torch.float32).isfinite().all())
    got = chunked_logits(decoder, known.ids[:10], [9, 1], [0], BLOCK, pool)
    assert torch.equal(got, known.logits[:10])


def test_golden_tokens_of_stories260k(shared_data: Path) -> None:
    """A real trained model, greedy, one token a step: 256 tokens."""
    folder = shared_data / "models" / "stories260K-hf"
    golden = json.loads((folder / "golden_greedy.json").read_text())
    decoder = load(folder)
    pool = pool_for(decoder, 20, BLOCK)
    blocks = list(range(1, 19))
    ids = list(golden["prompt_ids"])
    for _ in range(256):
        step = layout([(len(ids) - 1, 1, blocks)], BLOCK)
        ids.append(int(decoder.logits(decoder.forward(torch.tensor(ids[-1:]), step, pool)).argmax()))
    assert ids[1:] == golden["greedy_ids"][:256]
