"""The operations in plain torch: any device, any float dtype. The reference that faster ones are compared with.

Owns clarity, not speed: each request's keys and values are gathered and go through torch's own attention, quantized
weights are dequantized once, at load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.ops.base import HeadShape, Matrix, RMSNorm
from headstart.ops.batch import BatchLayout
from headstart.ops.formats import QuantizedWeight, WeightFormat
from headstart.ops.kv_layout import KVFormat, KVLayout


@dataclass(frozen=True, slots=True)
class TorchMatrix:
    weight: Tensor  # [N, K]

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class TorchEmbeddings:
    table: TorchMatrix

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.table.weight[token_ids]


@dataclass(frozen=True, slots=True)
class TorchNormLinear:
    norm: RMSNorm
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(rms_norm(x, self.norm.weight, self.norm.eps), self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class TorchAddLinear:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class TorchGatedMLP:
    norm: RMSNorm
    gate_up: Tensor  # [2 * I, C]: gate above up, one read of x
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        normed = rms_norm(x, self.norm.weight, self.norm.eps)
        gate, up = F.linear(normed, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down, self.down_bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32 inside, whatever x is."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


@dataclass(frozen=True, slots=True)
class TorchQKNorm:
    query: Tensor  # [D]
    key: Tensor  # [D]
    eps: float


class TorchAttentionStep:
    """One step; the blocks of every request's context are looked up once and used by all layers."""

    __slots__ = ("_contexts", "_cos", "_heads", "_kv", "_sin", "_slots")

    def __init__(self, layout: BatchLayout, heads: HeadShape, kv: KVLayout, cos: Tensor, sin: Tensor) -> None:
        self._heads = heads
        self._kv = kv
        self._slots = layout.slot_mapping
        self._cos, self._sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, D / 2]
        self._contexts: list[tuple[slice, Tensor, int, Tensor]] = []  # rows, blocks, context, mask [rows, context]
        for span in layout.spans:
            rows = slice(span.first_row, span.first_row + span.num_rows)
            mask = torch.ones(span.num_rows, span.context_len, dtype=torch.bool, device=self._slots.device)
            masked = mask.tril(span.context_len - span.num_rows)
            self._contexts.append((rows, span.block_table, span.context_len, masked))

    def rotate_and_write(self, qkv: Tensor, layer: Tensor, *, rotate: bool, qk_norm: TorchQKNorm | None) -> Tensor:
        heads = self._heads
        rotated = qkv[:, : heads.rotated_size].unflatten(-1, (-1, heads.head_dim))  # [T, H + K, D]
        if qk_norm is not None:
            queries, keys = rotated.split((heads.num_heads, heads.num_kv_heads), dim=1)
            normed = (rms_norm(queries, qk_norm.query, qk_norm.eps), rms_norm(keys, qk_norm.key, qk_norm.eps))
            rotated = torch.cat(normed, 1)
        if rotate:
            first, second = rotated.chunk(2, dim=-1)
            cos, sin = self._cos, self._sin
            rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(qkv.dtype)
        queries, keys = rotated.split((heads.num_heads, heads.num_kv_heads), dim=1)
        values = qkv[:, heads.rotated_size :].unflatten(-1, (-1, heads.head_dim))
        _write(layer, self._kv, self._slots, keys, values)
        return queries

    def attend(self, queries: Tensor, layer: Tensor) -> Tensor:
        out = torch.empty_like(queries)
        for rows, blocks, context, mask in self._contexts:
            keys, values = _read(layer, self._kv, blocks, context, queries.dtype)
            attended = F.scaled_dot_product_attention(
                queries[rows].transpose(0, 1).unsqueeze(0),
                keys.unsqueeze(0),
                values.unsqueeze(0),
                attn_mask=mask,
                scale=self._heads.scale,
                enable_gqa=self._heads.group_size > 1,
            )
            out[rows] = attended.squeeze(0).transpose(0, 1)
        return out.flatten(1)


# A block's bytes are codes `[2, K, S, D]`, keys before values, then, in formats with scales, scales `[2, K, S]`.


def _codes(layer: Tensor, kv: KVLayout) -> Tensor:
    """`[N, 2, K, S, D]` of the format's dtype; a view."""
    shape = (2, kv.num_kv_heads, kv.block_size, kv.head_dim)
    return layer[:, : math.prod(shape) * kv.format.dtype.itemsize].view(kv.format.dtype).unflatten(1, shape)


def _scales(layer: Tensor, kv: KVLayout) -> Tensor:
    """`[N, 2, K, S]` float32; a view."""
    shape = (2, kv.num_kv_heads, kv.block_size)
    return layer[:, -math.prod(shape) * 4 :].view(torch.float32).unflatten(1, shape)


def _write(layer: Tensor, kv: KVLayout, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """keys, values: `[T, K, D]`. Infinities and NaN would reach other requests through masked slots: none are kept."""
    blocks, offsets = slots // kv.block_size, slots % kv.block_size
    new = torch.stack((keys, values), 1).float().nan_to_num(0.0)  # [T, 2, K, D]
    codes = _codes(layer, kv)
    if kv.format.scaled:
        scales = new.abs().amax(-1) / (127.0 if kv.format is KVFormat.INT8 else 448.0)
        new = new / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
        if kv.format is KVFormat.INT8:
            new = new.round()
        _scales(layer, kv)[blocks, :, :, offsets] = scales
    else:
        limits = torch.finfo(kv.format.dtype)
        new = new.clamp(limits.min, limits.max)
    # Eight-bit floats cannot be assigned by index: their bytes can.
    raw = new.to(kv.format.dtype)
    if kv.format is KVFormat.FP8:
        codes, raw = codes.view(torch.uint8), raw.view(torch.uint8)
    codes[blocks, :, :, offsets] = raw


def _read(layer: Tensor, kv: KVLayout, blocks: Tensor, context: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values `[K, context, D]` of one request."""
    chosen = layer[blocks]
    found = _codes(chosen, kv).to(torch.float32 if kv.format.scaled else dtype)
    if kv.format.scaled:
        found = (found * _scales(chosen, kv).unsqueeze(-1)).to(dtype)
    keys, values = found.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
    return keys, values


class TorchOps:
    """`Ops` in plain torch. Rounding depends on the number of rows of a step: equal up to that, not to the bit."""

    def __init__(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self._device = torch.device(device)
        self._dtype = dtype

    @property
    def has_own_threads(self) -> bool:
        return False

    @property
    def weight_formats(self) -> frozenset[WeightFormat]:
        return frozenset()

    def pack(self, *parts: Matrix) -> TorchMatrix:
        floats = [part.dequantize() if isinstance(part, QuantizedWeight) else part for part in parts]
        matrix = torch.cat(floats) if len(floats) > 1 else floats[0]
        return TorchMatrix(matrix.to(self._device, self._dtype))

    def pack_gated(self, gate: Matrix, up: Matrix) -> TorchMatrix:
        return self.pack(gate, up)

    def embeddings(self, table: TorchMatrix) -> TorchEmbeddings:
        return TorchEmbeddings(table)

    def norm_linear(self, norm: RMSNorm, weight: TorchMatrix, bias: Tensor | None) -> TorchNormLinear:
        return TorchNormLinear(norm, weight.weight, bias)

    def lm_head(self, norm: RMSNorm, weight: TorchMatrix) -> TorchNormLinear:
        return TorchNormLinear(norm, weight.weight, None)

    def add_linear(self, weight: TorchMatrix, bias: Tensor | None) -> TorchAddLinear:
        return TorchAddLinear(weight.weight, bias)

    def gated_mlp(
        self,
        norm: RMSNorm,
        gate_up: TorchMatrix,
        down: TorchMatrix,
        *,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> TorchGatedMLP:
        biases = [bias for bias in (gate_bias, up_bias) if bias is not None]
        return TorchGatedMLP(norm, gate_up.weight, torch.cat(biases) if biases else None, down.weight, down_bias)

    def qk_norm(self, query: Tensor, key: Tensor, eps: float) -> TorchQKNorm:
        return TorchQKNorm(query, key, eps)

    def kv_layout(self, heads: HeadShape, block_size: int, kv_format: KVFormat) -> KVLayout:
        numbers = 2 * heads.num_kv_heads * block_size
        num_bytes = numbers * heads.head_dim * kv_format.dtype.itemsize + (numbers * 4 if kv_format.scaled else 0)
        return KVLayout(kv_format, heads.num_kv_heads, heads.head_dim, block_size, num_bytes)

    def attention_step(
        self, layout: BatchLayout, heads: HeadShape, kv: KVLayout, cos: Tensor, sin: Tensor
    ) -> TorchAttentionStep:
        return TorchAttentionStep(layout, heads, kv, cos, sin)
