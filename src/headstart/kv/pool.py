"""The KV pool: the memory that holds keys and values of all requests, addressed by layer and block.

Owns the memory; knows neither requests nor who uses which block, nor what lies where inside a block: that is the
layout's and the operations' matter. Letters: L layers, N blocks.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from headstart.ops import KVLayout


class KVPool:
    """Keys and values for `num_blocks * block_size` tokens of every layer, zero at first (so always finite)."""

    __slots__ = ("data", "layers", "layout", "num_blocks")

    def __init__(self, layout: KVLayout, num_layers: int, num_blocks: int, device: torch.device | str) -> None:
        assert num_layers > 0, num_layers
        assert num_blocks > 0, num_blocks
        self.layout = layout
        self.num_blocks = num_blocks
        self.data = _zeros((num_layers, num_blocks, layout.block_bytes), torch.device(device))  # [L, N, bytes] uint8
        self.layers: tuple[Tensor, ...] = tuple(self.data)  # each [N, bytes], views

    @staticmethod
    def bytes_per_block(layout: KVLayout, num_layers: int) -> int:
        """Bytes that one block of all layers takes."""
        return layout.block_bytes * num_layers

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def device(self) -> torch.device:
        return self.data.device


def _zeros(shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """Zeros that cost memory and time only where they are written: `torch.zeros` would touch gigabytes at start-up."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    num_bytes = shape[0] * shape[1] * shape[2]
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the tensor keeps it alive
    return torch.frombuffer(pages, dtype=torch.uint8).view(shape)
