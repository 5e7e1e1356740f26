"""How keys and values are held in the KV pool: the formats, and how many bytes a block takes.

Owns the words only; what lies where inside a block is the matter of the operations that read it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class KVFormat(enum.StrEnum):
    """`int8` and `fp8` (e4m3fn) have one float32 scale for each token and head, keys and values apart."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    FP8 = "fp8"

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self]

    @property
    def scaled(self) -> bool:
        return self in (KVFormat.INT8, KVFormat.FP8)


_DTYPES = {
    KVFormat.FLOAT32: torch.float32,
    KVFormat.FLOAT16: torch.float16,
    KVFormat.BFLOAT16: torch.bfloat16,
    KVFormat.INT8: torch.int8,
    KVFormat.FP8: torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One layer's part of the pool: `[N, block_bytes]` bytes, zero at first, N blocks of `block_size` tokens."""

    format: KVFormat
    num_kv_heads: int
    head_dim: int
    block_size: int
    block_bytes: int
