"""The operations in plain torch: any device, any float dtype. The reference that faster ones are compared with.

Owns clarity, not speed: each request's keys and values are gathered and go through torch's own attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.ops.base import HeadShape, PoolShape
from headstart.ops.batch import BatchLayout


@dataclass(frozen=True, slots=True)
class TorchLinear:
    weight: Tensor  # [out, in]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + residual


@dataclass(frozen=True, slots=True)
class TorchGatedLinear:
    """Gate and up rows in one matrix: one read of x."""

    weight: Tensor  # [2 * I, C]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.weight, self.bias).chunk(2, dim=-1)
        return F.silu(gate) * up


@dataclass(frozen=True, slots=True)
class TorchNorm:
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class TorchAttentionStep:
    """One step; the slots of every request's context are computed once and used by all layers."""

    __slots__ = ("_contexts", "_cos", "_heads", "_sin", "_slots")

    def __init__(self, layout: BatchLayout, heads: HeadShape, pool: PoolShape, cos: Tensor, sin: Tensor) -> None:
        self._heads = heads
        self._slots = layout.slot_mapping
        self._cos, self._sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, D / 2]
        offsets = torch.arange(pool.block_size, device=layout.slot_mapping.device)
        self._contexts: list[tuple[slice, Tensor, Tensor]] = []  # rows, slots [context], mask [rows, context]
        for span in layout.spans:
            slots = (span.block_table.unsqueeze(1) * pool.block_size + offsets).flatten()[: span.context_len]
            rows = slice(span.first_row, span.first_row + span.num_rows)
            mask = torch.ones(span.num_rows, span.context_len, dtype=torch.bool, device=slots.device)
            self._contexts.append((rows, slots, mask.tril(span.context_len - span.num_rows)))

    def rotate_and_write(self, qkv: Tensor, keys: Tensor, values: Tensor, *, rotate: bool) -> Tensor:
        heads = self._heads
        rotated = qkv[:, : heads.rotated_size].unflatten(-1, (-1, heads.head_dim))  # [T, H + K, D]
        if rotate:
            first, second = rotated.chunk(2, dim=-1)
            cos, sin = self._cos, self._sin
            rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(qkv.dtype)
        queries, new_keys = rotated.split((heads.num_heads, heads.num_kv_heads), dim=1)
        new_values = qkv[:, heads.rotated_size :].unflatten(-1, (-1, heads.head_dim))
        keys[:, self._slots] = new_keys.transpose(0, 1).to(keys.dtype)
        values[:, self._slots] = new_values.transpose(0, 1).to(values.dtype)
        return queries

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = torch.empty_like(queries)
        for rows, slots, mask in self._contexts:
            attended = F.scaled_dot_product_attention(
                queries[rows].transpose(0, 1).unsqueeze(0),
                keys[:, slots].to(queries.dtype).unsqueeze(0),
                values[:, slots].to(queries.dtype).unsqueeze(0),
                attn_mask=mask,
                scale=self._heads.scale,
                enable_gqa=self._heads.group_size > 1,
            )
            out[rows] = attended.squeeze(0).transpose(0, 1)
        return out.flatten(1)


class TorchOps:
    """`Ops` in plain torch. Rounding depends on the number of rows of a step: equal up to that, not to the bit."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> TorchLinear:
        return TorchLinear(weight, bias)

    def gated_linear(
        self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None
    ) -> TorchGatedLinear:
        biases = [bias for bias in (gate_bias, up_bias) if bias is not None]
        return TorchGatedLinear(torch.cat((gate, up)), torch.cat(biases) if biases else None)

    def rms_norm(self, weight: Tensor, eps: float) -> TorchNorm:
        return TorchNorm(weight, eps)

    def attention_step(
        self, layout: BatchLayout, heads: HeadShape, pool: PoolShape, cos: Tensor, sin: Tensor
    ) -> TorchAttentionStep:
        return TorchAttentionStep(layout, heads, pool, cos, sin)
