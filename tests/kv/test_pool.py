"""The KV pool's memory: its size and layout."""

from __future__ import annotations

import pytest
import torch

from headstart.kv import KVPool
from headstart.perf import ModelSpec, RopeSpec

SPEC = ModelSpec("llama", 32, 24, 16, 3, 4, 2, 8, 64, 1e-5, RopeSpec())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_per_block_is_what_a_block_takes(dtype: torch.dtype) -> None:
    pool = KVPool(SPEC, 5, 16, dtype, "cpu")
    assert pool.data.nbytes == 5 * KVPool.bytes_per_block(SPEC, 16, dtype)
    assert (pool.dtype, pool.device.type) == (dtype, "cpu")


def test_layers_are_views_of_one_memory_and_begin_finite() -> None:
    pool = KVPool(SPEC, 5, 4, torch.float32, "cpu")
    assert not pool.data.any()
    for layer in range(3):
        assert pool.keys(layer).shape == pool.values(layer).shape == (2, 20, 8)
        pool.keys(layer).fill_(2 * layer + 1)
        pool.values(layer).fill_(2 * layer + 2)
    assert [float(part[0, 0, 0]) for layer in pool.data for part in layer] == [1, 2, 3, 4, 5, 6]
