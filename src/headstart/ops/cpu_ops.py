"""`Ops` for float32 on CPU: prepacked linears, flash attention over the pool in place, bit-equal in any batch."""

from __future__ import annotations

from torch import Tensor

from headstart.ops.base import HeadShape, PoolShape
from headstart.ops.batch import BatchLayout
from headstart.ops.cpu_attention import CpuAttentionStep
from headstart.ops.cpu_linear import CpuGatedLinear, CpuLinear, CpuNorm
from headstart.ops.flash_shapes import FlashShapes, find_flash_shapes


class CpuOps:
    """The fast operations on CPU, equal to the bit whatever a step is made of (decision 0007).

    One instance a model: it holds what was found out about the model's head size.
    """

    def __init__(self, head_dim: int) -> None:
        self.shapes: FlashShapes = find_flash_shapes(head_dim)

    def linear(self, weight: Tensor, bias: Tensor | None) -> CpuLinear:
        return CpuLinear(weight, bias)

    def gated_linear(
        self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None
    ) -> CpuGatedLinear:
        return CpuGatedLinear(gate, up, gate_bias, up_bias)

    def rms_norm(self, weight: Tensor, eps: float) -> CpuNorm:
        return CpuNorm(weight, eps)

    def attention_step(
        self, layout: BatchLayout, heads: HeadShape, pool: PoolShape, cos: Tensor, sin: Tensor
    ) -> CpuAttentionStep:
        return CpuAttentionStep(layout, heads, pool, cos, sin, self.shapes)
