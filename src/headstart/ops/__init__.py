"""The fused operations of a decoder: one protocol, our own kernels on CPU, plain torch everywhere.

Must not know models, requests or schedulers.
"""

from __future__ import annotations

import importlib.util
import logging

import torch

from headstart.ops.base import (
    AddLinear,
    AttentionStep,
    Embeddings,
    GatedMLP,
    HeadShape,
    Matrix,
    NormLinear,
    Ops,
    Own,
    PackedMatrix,
    RMSNorm,
)
from headstart.ops.batch import BatchLayout, ChunkSpan
from headstart.ops.formats import QuantizedWeight, WeightFormat
from headstart.ops.kv_layout import KVFormat, KVLayout
from headstart.ops.torch_ops import TorchOps

__all__ = [
    "AddLinear",
    "AttentionStep",
    "BatchLayout",
    "ChunkSpan",
    "Embeddings",
    "GatedMLP",
    "HeadShape",
    "KVFormat",
    "KVLayout",
    "Matrix",
    "NormLinear",
    "Ops",
    "Own",
    "PackedMatrix",
    "QuantizedWeight",
    "RMSNorm",
    "TorchOps",
    "WeightFormat",
    "has_native_kernels",
    "make_ops",
]

_logger = logging.getLogger(__name__)
_NATIVE_FORMATS = {torch.float32: WeightFormat.FLOAT32, torch.bfloat16: WeightFormat.BFLOAT16}


def has_native_kernels() -> bool:
    """Whether `native/` was built with this installation: without a C++ compiler it was not."""
    return importlib.util.find_spec("headstart._native") is not None


def make_ops(device: torch.device, dtype: torch.dtype, *, threads: int) -> Ops:
    """The best operations for where and how the weights are held. `threads`: of the kernels on CPU.

    On CPU bfloat16 is a format of the weights only: activations are float32. Without the kernels, which is said once,
    and in other dtypes it is plain torch.
    """
    if device.type != "cpu" or dtype not in _NATIVE_FORMATS:
        return TorchOps(device, dtype)
    if not has_native_kernels():
        _logger.warning(
            "the CPU kernels were not built (no C++ compiler when headstart was installed): "
            "plain torch is used, which is several times slower; install g++ or clang and reinstall headstart"
        )
        return TorchOps(device, dtype)
    from headstart.ops.native_ops import NativeOps  # optional: needs the compiled module

    return NativeOps(threads, matrix_format=_NATIVE_FORMATS[dtype])
