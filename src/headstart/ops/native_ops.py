"""The operations on a CPU by our own kernels (`native/`), equal to the bit whatever a step is made of.

Owns the packed weights, the compute threads and the buffers that a step's results lie in: they are allocated once and
grow with the largest step. Activations are float32 inside; matrices are held in the format that the checkpoint has, or
in the one asked for. Letters: T rows of the step, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headstart import _native as native
from headstart.ops.base import HeadShape, Matrix, RMSNorm
from headstart.ops.batch import BatchLayout
from headstart.ops.formats import QuantizedWeight, WeightFormat
from headstart.ops.kv_layout import KVFormat, KVLayout

_PANEL = 16  # outputs that are packed together
_LOG2_E = math.log2(math.e)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _floats(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


class _Buffer:
    """Room for the `[T, width]` result of an operation, reused from call to call."""

    __slots__ = ("_memory", "_width")

    def __init__(self, width: int) -> None:
        self._width = width
        self._memory = torch.empty(0)

    def rows(self, count: int) -> Tensor:
        needed = count * self._width
        if self._memory.numel() < needed:
            self._memory = torch.empty(needed + needed // 4)
        return self._memory[:needed].view(count, self._width)


@dataclass(frozen=True, slots=True)
class NativeMatrix:
    packed: native.PackedWeight
    num_outputs: int  # without the padding of gate and up panels
    num_inputs: int

    @property
    def num_bytes(self) -> int:
        return int(self.packed.num_bytes)


class NativeEmbeddings:
    __slots__ = ("_runtime", "_table")

    def __init__(self, runtime: native.Runtime, table: NativeMatrix) -> None:
        self._runtime, self._table = runtime, table

    def __call__(self, token_ids: Tensor) -> Tensor:
        count = token_ids.shape[0]
        out = torch.empty(count, self._table.num_inputs)
        self._table.packed.unpack(self._runtime, token_ids.data_ptr(), count, out.data_ptr())
        return out


class NativeNormLinear:
    __slots__ = ("_layer", "_out", "_runtime", "_width")

    def __init__(
        self, runtime: native.Runtime, norm: RMSNorm, weight: NativeMatrix, bias: Tensor | None, out: _Buffer | None
    ) -> None:
        scale, added = _floats(norm.weight), _floats(bias)
        self._runtime, self._out, self._width = runtime, out, weight.num_outputs
        self._layer = native.LinearLayer(weight.packed, _address(added), _address(scale), norm.eps)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        out = torch.empty(rows, self._width) if self._out is None else self._out.rows(rows)
        self._layer.run(self._runtime, x.data_ptr(), x.stride(0), rows, out.data_ptr(), self._width, False)
        return out


class NativeAddLinear:
    __slots__ = ("_layer", "_runtime")

    def __init__(self, runtime: native.Runtime, weight: NativeMatrix, bias: Tensor | None) -> None:
        added = _floats(bias)
        self._runtime = runtime
        self._layer = native.LinearLayer(weight.packed, _address(added), 0, 0.0)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        self._layer.run(
            self._runtime, x.data_ptr(), x.stride(0), x.shape[0], residual.data_ptr(), residual.stride(0), True
        )
        return residual


class NativeGatedMLP:
    __slots__ = ("_layer", "_runtime")

    def __init__(self, runtime: native.Runtime, layer: native.GatedMlpLayer) -> None:
        self._runtime, self._layer = runtime, layer

    def __call__(self, x: Tensor) -> Tensor:
        at, stride = x.data_ptr(), x.stride(0)
        self._layer.run(self._runtime, at, stride, x.shape[0], at, stride, True)
        return x


class NativeAttentionStep:
    """`AttentionStep`. Keeps what the step's addresses point to alive."""

    __slots__ = ("_kept", "_out", "_queries", "_runtime", "_step", "_width")

    def __init__(
        self,
        runtime: native.Runtime,
        shape: native.AttentionShape,
        heads: HeadShape,
        layout: BatchLayout,
        cos: Tensor,
        sin: Tensor,
        queries: Tensor,
        out: Tensor,
    ) -> None:
        spans = np.array(
            [(each.first_row, each.num_rows, each.context_len, each.block_table.data_ptr()) for each in layout.spans],
            dtype=np.int64,
        )
        self._kept = (layout, cos, sin)
        self._runtime, self._queries, self._out = runtime, queries, out
        self._width = heads.num_heads * heads.head_dim
        self._step = native.AttentionStep(
            shape,
            layout.positions.shape[0],
            spans.ctypes.data,
            len(layout.spans),
            cos.data_ptr(),
            sin.data_ptr(),
            layout.slot_mapping.data_ptr(),
            heads.scale * _LOG2_E,
            queries.data_ptr(),
        )

    def rotate_and_write(self, qkv: Tensor, layer: Tensor, *, rotate: bool, qk_norm: native.QkNorm | None) -> Tensor:
        self._step.rotate_and_write(self._runtime, layer.data_ptr(), qkv.data_ptr(), qkv.stride(0), rotate, qk_norm)
        return self._queries

    def attend(self, queries: Tensor, layer: Tensor) -> Tensor:
        assert queries is self._queries, "attend takes what rotate_and_write returned"
        self._step.attend(self._runtime, layer.data_ptr(), self._out.data_ptr(), self._width)
        return self._out


class NativeOps:
    """The fast operations on CPU, equal to the bit whatever a step is made of (decision 0007).

    Args: `threads` of compute; `cpus` to pin them to, the caller first; `matrix_format`: what float matrices are held
    in, FLOAT32 or BFLOAT16; `instruction_set`: a name of `native.instruction_sets()`, by default the best.
    """

    def __init__(
        self,
        threads: int,
        *,
        cpus: tuple[int, ...] = (),
        matrix_format: WeightFormat = WeightFormat.FLOAT32,
        instruction_set: str = "",
    ) -> None:
        assert matrix_format in (WeightFormat.FLOAT32, WeightFormat.BFLOAT16)
        self.runtime = native.Runtime(threads, list(cpus), instruction_set)
        self._float_format = matrix_format
        self._buffers: dict[tuple[str, int], _Buffer] = {}
        self._shapes: dict[tuple[HeadShape, KVLayout], native.AttentionShape] = {}

    @property
    def has_own_threads(self) -> bool:
        return True

    @property
    def weight_formats(self) -> frozenset[WeightFormat]:
        return frozenset(WeightFormat)

    @property
    def instruction_set(self) -> str:
        return str(self.runtime.instruction_set)

    def pack(self, *parts: Matrix) -> NativeMatrix:
        num_inputs = parts[0].shape[1]
        num_outputs = sum(part.shape[0] for part in parts)
        packed = native.PackedWeight(self._format(parts[0]), num_outputs, num_inputs)
        first = 0
        for part in parts:
            self._pack(packed, part, first, native.Placement.PLAIN)
            first += part.shape[0]
        return NativeMatrix(packed, num_outputs, num_inputs)

    def pack_gated(self, gate: Matrix, up: Matrix) -> NativeMatrix:
        num_outputs, num_inputs = gate.shape
        panels = -(-num_outputs // _PANEL)
        packed = native.PackedWeight(self._format(gate), 2 * panels * _PANEL, num_inputs)
        self._pack(packed, gate, 0, native.Placement.GATE)
        self._pack(packed, up, 0, native.Placement.UP)
        return NativeMatrix(packed, 2 * num_outputs, num_inputs)

    def embeddings(self, table: NativeMatrix) -> NativeEmbeddings:
        return NativeEmbeddings(self.runtime, table)

    def norm_linear(self, norm: RMSNorm, weight: NativeMatrix, bias: Tensor | None) -> NativeNormLinear:
        return NativeNormLinear(self.runtime, norm, weight, bias, self._buffer("linear", weight.num_outputs))

    def lm_head(self, norm: RMSNorm, weight: NativeMatrix) -> NativeNormLinear:
        return NativeNormLinear(self.runtime, norm, weight, None, None)

    def add_linear(self, weight: NativeMatrix, bias: Tensor | None) -> NativeAddLinear:
        return NativeAddLinear(self.runtime, weight, bias)

    def gated_mlp(
        self,
        norm: RMSNorm,
        gate_up: NativeMatrix,
        down: NativeMatrix,
        *,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> NativeGatedMLP:
        gate_bias, up_bias, down_bias = _floats(gate_bias), _floats(up_bias), _floats(down_bias)
        scale = _floats(norm.weight)
        layer = native.GatedMlpLayer(
            gate_up.packed,
            _address(gate_bias),
            _address(up_bias),
            down.packed,
            _address(down_bias),
            _address(scale),
            norm.eps,
        )
        return NativeGatedMLP(self.runtime, layer)

    def qk_norm(self, query: Tensor, key: Tensor, eps: float) -> native.QkNorm:
        query, key = query.float().contiguous(), key.float().contiguous()
        return native.QkNorm(query.data_ptr(), key.data_ptr(), query.shape[0], eps)

    def kv_layout(self, heads: HeadShape, block_size: int, kv_format: KVFormat) -> KVLayout:
        shape = _attention_shape(heads, block_size, kv_format)
        return KVLayout(kv_format, heads.num_kv_heads, heads.head_dim, block_size, shape.block_bytes)

    def attention_step(
        self, layout: BatchLayout, heads: HeadShape, kv: KVLayout, cos: Tensor, sin: Tensor
    ) -> NativeAttentionStep:
        shape = self._shapes.get((heads, kv))
        if shape is None:
            shape = self._shapes[heads, kv] = _attention_shape(heads, kv.block_size, kv.format)
        rows = layout.positions.shape[0]
        queries = self._buffer("queries", heads.num_heads * shape.padded_dim).rows(rows)
        out = self._buffer("attended", heads.num_heads * heads.head_dim).rows(rows)
        return NativeAttentionStep(self.runtime, shape, heads, layout, cos, sin, queries, out)

    def _buffer(self, use: str, width: int) -> _Buffer:
        return self._buffers.setdefault((use, width), _Buffer(width))

    def _format(self, part: Matrix) -> native.Format:
        return _FORMATS[part.format if isinstance(part, QuantizedWeight) else self._float_format]

    def _pack(self, packed: native.PackedWeight, part: Matrix, first: int, placement: native.Placement) -> None:
        rows = part.shape[0]
        if not isinstance(part, QuantizedWeight):
            if part.dtype == torch.bfloat16 and self._float_format is WeightFormat.BFLOAT16:
                dense = part.contiguous()
                packed.pack_bfloats(self.runtime, dense.data_ptr(), rows, first, placement)
            else:
                dense = part.float().contiguous()
                packed.pack_floats(self.runtime, dense.data_ptr(), rows, first, placement)
            return
        codes, scales = part.codes.contiguous(), part.scales.contiguous()
        if part.format is WeightFormat.FP8:
            packed.pack_fp8(self.runtime, codes.data_ptr(), scales.data_ptr(), rows, first, placement)
            return
        minimums = None if part.minimums is None else part.minimums.contiguous()
        packed.pack_groups(
            self.runtime, codes.data_ptr(), scales.data_ptr(), _address(minimums), rows, first, placement
        )


_FORMATS = {
    WeightFormat.FLOAT32: native.Format.FLOAT32,
    WeightFormat.BFLOAT16: native.Format.BFLOAT16,
    WeightFormat.FP8: native.Format.FP8,
    WeightFormat.Q8_0: native.Format.Q8_0,
    WeightFormat.Q4_0: native.Format.Q4_0,
    WeightFormat.Q4_1: native.Format.Q4_1,
}
_KV_FORMATS = {
    KVFormat.FLOAT32: native.KvFormat.FLOAT32,
    KVFormat.FLOAT16: native.KvFormat.FLOAT16,
    KVFormat.BFLOAT16: native.KvFormat.BFLOAT16,
    KVFormat.INT8: native.KvFormat.INT8,
    KVFormat.FP8: native.KvFormat.FP8,
}


def _attention_shape(heads: HeadShape, block_size: int, kv_format: KVFormat) -> native.AttentionShape:
    return native.AttentionShape(
        _KV_FORMATS[kv_format], heads.num_heads, heads.num_kv_heads, heads.head_dim, block_size
    )
