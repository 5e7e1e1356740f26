"""The KV pool: the tensors that hold keys and values of all requests, addressed by block.

Owns memory and its layout; knows neither requests nor who uses which block. Letters: L layers, N blocks, S block size,
K KV heads, D head size.

Layout: one tensor `[L, 2, K, N * S, D]`. A KV head's slots are contiguous, so the keys of a request whose blocks are
consecutive are a *view* `[K, context, D]` with dense rows: attention reads them in place, without a copy.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from headstart.perf.model_spec import ModelSpec


class KVPool:
    """Keys and values for `num_blocks * block_size` tokens of every layer, zero at first (so always finite)."""

    __slots__ = ("block_size", "data", "num_blocks")

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        assert num_blocks > 0, num_blocks
        assert block_size > 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (spec.num_layers, 2, spec.num_kv_heads, num_blocks * block_size, spec.head_dim)
        self.data = _zeros(shape, dtype, torch.device(device))  # [L, 2, K, N * S, D]

    @staticmethod
    def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block of all layers takes."""
        return spec.kv_bytes_per_token(dtype.itemsize) * block_size

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    def keys(self, layer: int) -> Tensor:
        """Keys of one layer, `[K, N * S, D]`; a view."""
        return self.data[layer, 0]

    def values(self, layer: int) -> Tensor:
        """Values of one layer, `[K, N * S, D]`; a view."""
        return self.data[layer, 1]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost memory and time only where they are written: `torch.zeros` would touch gigabytes at start-up."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the tensor keeps it alive
    return torch.frombuffer(pages, dtype=dtype).view(shape)
