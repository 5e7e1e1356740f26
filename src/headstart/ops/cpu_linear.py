"""Linear layers and norms for float32 on CPU whose rows never depend on how many rows there are.

Owns oneDNN's prepacked weights. Measured on 2 cores: 1.3 to 2 times as fast as `F.linear` at 4 to 1,024 rows. Packed
for 64 rows or more, oneDNN's kernels sum each row in one fixed order, so a row's bits are the same in any batch; MKL's,
behind `F.linear`, are not. What follows the product (silu, times, plus) is done while the tile is still in cache.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ELEMENTS_AT_ONCE = 32  # torch's loops take two vectors at a time, of at most 16 floats each
_PACK_ROWS = 512  # the number of rows to pack for; packed for 1 row the sums' order would differ

_pack = torch.ops.mkldnn._reorder_linear_weight
_linear = torch.ops.mkldnn._linear_pointwise
_linear_binary = torch.ops.mkldnn._linear_pointwise.binary


class CpuLinear:
    """`Linear` over a prepacked weight."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = _pack(weight.contiguous(), _PACK_ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return _linear(x, self._weight, self._bias, "none", [], "")

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return _linear_binary(x, residual, self._weight, self._bias, "add")


class CpuGatedLinear:
    """Two products: the first goes through silu, the second is multiplied by it.

    Torch's silu is faster (by 8 % of the whole), but it rounds differently where its vectors do not fill:
    at the ends of what each thread gets. It is used where rows always split into whole vectors; else oneDNN does it.
    """

    __slots__ = ("_apart", "_gate", "_gate_bias", "_up", "_up_bias")

    def __init__(self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None) -> None:
        self._gate, self._gate_bias = _pack(gate.contiguous(), _PACK_ROWS), gate_bias
        self._up, self._up_bias = _pack(up.contiguous(), _PACK_ROWS), up_bias
        self._apart = splits_into_whole_vectors(gate.shape[0], torch.get_num_threads())

    def __call__(self, x: Tensor) -> Tensor:
        if self._apart:
            gate = _linear(x, self._gate, self._gate_bias, "none", [], "")
            up = _linear(x, self._up, self._up_bias, "none", [], "")
            return torch.nn.functional.silu(gate, inplace=True).mul_(up)
        gate = _linear(x, self._gate, self._gate_bias, "swish", [], "")
        return _linear_binary(x, gate, self._up, self._up_bias, "mul")


def splits_into_whole_vectors(row_size: int, threads: int) -> bool:
    """Rows of this size, any number of them, shared evenly by up to `threads` threads: nobody gets part of a vector."""
    return row_size % (_ELEMENTS_AT_ONCE * math.lcm(*range(1, threads + 1))) == 0


class CpuNorm:
    """RMS norm of operations that round exactly, so that vector lanes and leftovers agree; sqrt(C) is in the weight."""

    __slots__ = ("_eps", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self._weight = weight * size**0.5
        self._eps = eps * size

    def __call__(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        norm.square_().add_(self._eps).sqrt_()
        return x.div(norm).mul_(self._weight)
