"""The protocol of the fused operations that a decoder is made of. One implementation a kind of machine.

Owns the words only. An implementation must not know models, requests or schedulers; what a step looks like comes in as
a `BatchLayout`. Letters: T rows of the step, H query heads, K KV heads, D head size, C hidden size, I intermediate
size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from headstart.ops.batch import BatchLayout
from headstart.ops.formats import QuantizedWeight, WeightFormat
from headstart.ops.kv_layout import KVFormat, KVLayout

Own = Any  # something that an implementation of `Ops` made, and takes back: no other can read it
Matrix = Tensor | QuantizedWeight  # [N, K] as a checkpoint gives it: floats, or codes of a format


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
class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * weight`, the mean over the last dimension (RMSNorm: Zhang & Sennrich, 2019)."""

    weight: Tensor  # [C]
    eps: float


class PackedMatrix(Protocol):
    """A matrix prepared for this machine; it may be used by several operations (a tied embedding and LM head)."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        ...


class Embeddings(Protocol):
    """Rows of a matrix `[V, C]` by token id. ids: `[T]` int64; result `[T, C]`, the caller's own."""

    def __call__(self, token_ids: Tensor) -> Tensor: ...


class NormLinear(Protocol):
    """`norm(x) @ W.T + b`. x: `[T, in]`; the result `[T, out]` is good until the next call of any operation like it."""

    def __call__(self, x: Tensor) -> Tensor: ...


class AddLinear(Protocol):
    """`residual + x @ W.T + b`, the residual `[T, out]`, which may be overwritten by the result. x: `[T, in]`."""

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor: ...


class GatedMLP(Protocol):
    """`x + down(silu(gate(norm(x))) * up(norm(x)))`. x: `[T, C]`, which may be overwritten by the result."""

    def __call__(self, x: Tensor) -> Tensor: ...


class AttentionStep(Protocol):
    """The attention of one step: made once from its layout, used by every layer."""

    def rotate_and_write(self, qkv: Tensor, layer: Tensor, *, rotate: bool, qk_norm: Own) -> Tensor:
        """Norm and rotate queries and keys; write keys and values to the slots of the layer's part of the pool.

        qkv: `[T, (H + 2K) * D]`. Returns the queries, in a form that only `attend` reads, before the next call.
        `rotate=False`: a layer without position embedding. What is written is finite, whatever came in.
        """
        ...

    def attend(self, queries: Tensor, layer: Tensor) -> Tensor:
        """Causal attention of each row over its own request's slots. Returns `[T, H * D]`, good until the next call."""
        ...


class Ops(Protocol):
    """What a decoder computes with. What one request computes never reads what another one has in the step.

    Whether its results are also equal *to the bit* whatever else is in the step, and however its tokens are divided
    into steps, is a property of the implementation: `NativeOps` promises it; `TorchOps`, whose kernels choose their
    order of summation by the number of rows, does not.
    """

    @property
    def has_own_threads(self) -> bool:
        """It computes with threads of its own, not with torch's."""
        ...

    @property
    def weight_formats(self) -> frozenset[WeightFormat]:
        """The formats of quantized matrices that it computes with; what is in another one becomes floats."""
        ...

    def pack(self, *parts: Matrix) -> PackedMatrix:
        """Matrices of one format and width, under each other. The caller lets go of the originals."""
        ...

    def pack_gated(self, gate: Matrix, up: Matrix) -> PackedMatrix:
        """The two matrices `[I, C]` of a gated MLP, of one format."""
        ...

    def embeddings(self, table: Own) -> Embeddings: ...

    def norm_linear(self, norm: RMSNorm, weight: Own, bias: Tensor | None) -> NormLinear: ...

    def lm_head(self, norm: RMSNorm, weight: Own) -> NormLinear:
        """As `norm_linear`, but every result is the caller's own."""
        ...

    def add_linear(self, weight: Own, bias: Tensor | None) -> AddLinear: ...

    def gated_mlp(
        self,
        norm: RMSNorm,
        gate_up: Own,
        down: Own,
        *,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> GatedMLP: ...

    def qk_norm(self, query: Tensor, key: Tensor, eps: float) -> Own:
        """An RMS norm of each head of queries and keys, before the rotary embedding. query, key: weights `[D]`."""
        ...

    def kv_layout(self, heads: HeadShape, block_size: int, kv_format: KVFormat) -> KVLayout:
        """How a layer's keys and values are held."""
        ...

    def attention_step(
        self, layout: BatchLayout, heads: HeadShape, kv: KVLayout, cos: Tensor, sin: Tensor
    ) -> AttentionStep:
        """Prepare one step. cos, sin: `[T, D / 2]`, of the rows' positions."""
        ...
