"""Linear layers and norms for float32 on CPU whose rows never depend on how many rows there are.

Owns oneDNN's prepacked weights. Measured on 2 cores: 1.3 to 2 times as fast as `F.linear` at 4 to 1,024 rows. Packed
for 64 rows or more, oneDNN's kernels sum each row in one fixed order, so a row's bits are the same in any batch; MKL's,
behind `F.linear`, are not. What follows the product (silu, times, plus) is done while the tile is still in cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    """Two products: the first ends in silu, the second in a multiplication by the first."""

    __slots__ = ("_gate", "_gate_bias", "_up", "_up_bias")

    def __init__(self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None) -> None:
        self._gate, self._gate_bias = _pack(gate.contiguous(), _PACK_ROWS), gate_bias
        self._up, self._up_bias = _pack(up.contiguous(), _PACK_ROWS), up_bias

    def __call__(self, x: Tensor) -> Tensor:
        gate = _linear(x, self._gate, self._gate_bias, "swish", [], "")
        return _linear_binary(x, gate, self._up, self._up_bias, "mul")


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
