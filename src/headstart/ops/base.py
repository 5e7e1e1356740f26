"""The protocol of the fused operations that a decoder is made of. One implementation a kind of machine.

Owns the words only. An implementation must not know models, requests or schedulers; what a step looks like comes in as
a `BatchLayout`. Letters: T rows of the step, H query heads, K KV heads, D head size, N blocks, S block size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headstart.ops.batch import BatchLayout


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of an attention layer; query head h reads KV head `h // (H / K)`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def rotated_size(self) -> int:
        """Columns of a fused qkv row that rotary embedding touches: queries, then keys."""
        return (self.num_heads + self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The paged memory that a layer's keys and values lie in: `N` blocks of `S` slots."""

    num_blocks: int
    block_size: int
    dtype: torch.dtype

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size


class Linear(Protocol):
    """`x @ W.T + b` with prepared weights, and what may follow it in the same pass. x: `[T, in]`, result `[T, out]`."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`linear(x) + residual`, the residual `[T, out]`."""
        ...


class GatedLinear(Protocol):
    """`silu(x @ G.T + g) * (x @ U.T + u)`: the first half of a gated MLP. x: `[T, C]`, result `[T, I]`."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Norm(Protocol):
    """`x / sqrt(mean(x^2) + eps) * weight`, the mean over the last dimension. Result shaped like x."""

    def __call__(self, x: Tensor) -> Tensor: ...


class AttentionStep(Protocol):
    """The attention of one step: made once from its layout, used by every layer."""

    def rotate_and_write(self, qkv: Tensor, keys: Tensor, values: Tensor, *, rotate: bool) -> Tensor:
        """Rotate queries and keys by their positions and write keys and values to their slots.

        qkv: `[T, (H + 2K) * D]`, keys and values of the layer: `[K, N * S, D]`. Returns the queries, to be handed to
        `attend` before the next call. `rotate=False`: a layer without position embedding.
        """
        ...

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Causal attention of each row over its own request's slots. Returns `[T, H * D]`, good until the next call."""
        ...


class Ops(Protocol):
    """What a decoder computes with. What one request computes never reads what another one has in the step.

    Whether its results are also equal *to the bit* whatever else is in the step, and however its tokens are divided
    into steps, is a property of the implementation: `CpuOps` promises it; `TorchOps`, whose kernels choose their order
    of summation by the number of rows, does not.
    """

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Prepare a weight `[out, in]`. It may be repacked: the caller lets go of the original."""
        ...

    def gated_linear(
        self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None
    ) -> GatedLinear: ...

    def rms_norm(self, weight: Tensor, eps: float) -> Norm:
        """weight: `[C]`, or one row a head, `[heads, D]`."""
        ...

    def attention_step(
        self, layout: BatchLayout, heads: HeadShape, pool: PoolShape, cos: Tensor, sin: Tensor
    ) -> AttentionStep:
        """Prepare one step. cos, sin: `[T, D / 2]`, of the rows' positions."""
        ...
