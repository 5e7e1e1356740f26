"""The KV pool's memory: its size and its layers."""

from __future__ import annotations

import pytest

from headstart.kv import KVPool
from headstart.ops import HeadShape, KVFormat, TorchOps

HEADS = HeadShape(4, 2, 8)


@pytest.mark.parametrize("kv_format", KVFormat)
def test_bytes_per_block_is_what_a_block_takes(kv_format: KVFormat) -> None:
    layout = TorchOps().kv_layout(HEADS, 16, kv_format)
    pool = KVPool(layout, 3, 5, "cpu")
    assert pool.data.nbytes == 5 * KVPool.bytes_per_block(layout, 3)
    assert (pool.block_size, pool.device.type) == (16, "cpu")
    numbers = 3 * 5 * 2 * 2 * 16  # layers, blocks, keys and values, heads, slots
    assert pool.data.nbytes == numbers * (8 * kv_format.dtype.itemsize + (4 if kv_format.scaled else 0))


def test_layers_are_views_of_one_memory_and_begin_zero() -> None:
    pool = KVPool(TorchOps().kv_layout(HEADS, 4, KVFormat.FLOAT32), 3, 5, "cpu")
    assert not pool.data.any()
    for index, layer in enumerate(pool.layers):
        assert layer.shape == (5, pool.layout.block_bytes)
        layer.fill_(index + 1)
    assert pool.data[:, 0, 0].tolist() == [1, 2, 3]
