"""The fused operations of a decoder: one protocol, plain torch for any device, a fast path for float32 on CPU.

Must not know models, requests or schedulers.
"""

from __future__ import annotations

import torch

from headstart.ops.base import (
    AttentionStep,
    GatedLinear,
    HeadShape,
    Linear,
    Norm,
    Ops,
    PoolShape,
)
from headstart.ops.batch import BatchLayout, ChunkSpan
from headstart.ops.cpu_ops import CpuOps
from headstart.ops.torch_ops import TorchOps

__all__ = [
    "AttentionStep",
    "BatchLayout",
    "ChunkSpan",
    "CpuOps",
    "GatedLinear",
    "HeadShape",
    "Linear",
    "Norm",
    "Ops",
    "PoolShape",
    "TorchOps",
    "make_ops",
]


def make_ops(device: torch.device, dtype: torch.dtype, head_dim: int) -> Ops:
    """The best operations for where and how the weights are held."""
    if device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return CpuOps(head_dim)
    return TorchOps()
