"""Matrices of checkpoints that were quantized by others, as they are: the same codes under the same scales.

Owns what the numbers in each layout of `perf.quantization_spec` mean. Must not know files or names of tensors. Letters:
N rows, K columns, G groups of 32 columns, S groups of the checkpoint in a row.

Scales become float16 where the format has float16 ones. That is exact for a checkpoint's float16 and changes a value by
less than one part in 2000 otherwise, unless the scale is below 0.00006, where float16 has fewer digits. Groups of eight
bits whose values would suffer by more than half a step are then quantized anew from their values.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.ops.formats import GROUP_SIZE, QuantizedWeight, WeightFormat
from headstart.perf.quantization_spec import QuantizationSpec
from headstart.quant.method import METHODS, QuantizationError, pack_nibbles
from headstart.quant.report import Report

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # of the eight codes in a word, which one is column 0, 1, 2, ..
_MIDDLE = 8  # the zero point of symmetric four-bit codes
_CHUNK = 1 << 22  # values that are held as float32 at a time


def checkpoint_format(spec: QuantizationSpec) -> WeightFormat:
    """The format in which a checkpoint's quantized matrices are held."""
    if spec.layout in ("awq", "gptq", "int4-packed"):
        return WeightFormat.Q4_0 if spec.symmetric else WeightFormat.Q4_1
    return WeightFormat.FP8 if spec.layout == "fp8" else WeightFormat.Q8_0


def decode(
    spec: QuantizationSpec, shape: tuple[int, int], parts: Mapping[str, Tensor], report: Report
) -> QuantizedWeight:
    """The matrix `[N, K]` whose tensors, checked by `perf.quantized_tensors`, are `parts`.

    Raises `QuantizationError` for numbers that are not finite, reordered columns and zero points where none can be.
    """
    _refuse_unread(spec, shape, parts)
    if spec.layout == "fp8":
        return _fp8(spec, shape, parts, report)
    if spec.layout in ("awq", "gptq"):
        return _four_bits(shape, *_awq_or_gptq(spec, parts), spec.symmetric)
    scales = _over_groups(parts["weight_scale"], shape)
    if spec.layout == "int4-packed":
        codes = _nibbles(parts["weight_packed"]).flatten(1)[:, : shape[1]]
        zeros = torch.full_like(scales, _MIDDLE)
        if not spec.symmetric:  # packed along N
            zeros = _nibbles(parts["weight_zero_point"].t()).flatten(1)[:, : shape[0]].t()
        return _four_bits(shape, codes, scales, _over_groups(zeros, shape), spec.symmetric)
    if spec.layout == "int8":
        return _eight_bits(shape, parts["weight"], scales)
    unsigned = parts["weight_packed"].view(torch.uint8)[:, : shape[1]]
    return _eight_bits(shape, (unsigned ^ 128).view(torch.int8), scales)


def _refuse_unread(spec: QuantizationSpec, shape: tuple[int, int], parts: Mapping[str, Tensor]) -> None:
    """What may be there but must say nothing."""
    order = parts.get("g_idx", parts.get("weight_g_idx"))
    if order is not None:
        trivial = torch.arange(shape[1]) // (spec.group_size or shape[1])
        if not torch.equal(order.long(), trivial):
            raise QuantizationError(
                "has its columns reordered by activation (desc_act), which is not supported: "
                "use a checkpoint that was made with desc_act false"
            )
    for name in ("weight_zero_point", "bias") if spec.symmetric else ("bias",):
        if name in parts and bool((parts[name].float() != 0).any()):
            raise QuantizationError(f"has a {name} that is not zero, which this model cannot have")


def _eight_bits(shape: tuple[int, int], codes: Tensor, scales: Tensor) -> QuantizedWeight:
    """codes: int8 `[N, K]`; scales: `[N, G]`."""
    num_rows, num_groups = scales.shape
    padded = F.pad(codes, (0, num_groups * GROUP_SIZE - shape[1])).contiguous()
    halves, wide = _float16(scales), scales.float()
    poor = (halves.float() - wide).abs() * 127 > wide.abs() / 2
    if bool(poor.any()):
        padded = padded.clone()  # it may be the file itself
        groups = padded.view(num_rows, num_groups, GROUP_SIZE)
        again = METHODS["int8"].quantize(groups[poor].float() * wide[poor].unsqueeze(-1))
        groups[poor], halves[poor] = again.codes, again.scales.squeeze(-1)
    return QuantizedWeight(WeightFormat.Q8_0, shape, padded, halves)


def _four_bits(
    shape: tuple[int, int], codes: Tensor, scales: Tensor, zeros: Tensor, symmetric: bool
) -> QuantizedWeight:
    """value = (code - zero) * scale. codes: uint8 `[N, K]`, 0 to 15; scales, zeros: `[N, G]`."""
    num_groups = scales.shape[1]
    padding = num_groups * GROUP_SIZE - shape[1]
    groups = F.pad(codes, (0, padding), value=_MIDDLE if symmetric else 0).view(shape[0], num_groups, GROUP_SIZE)
    if symmetric and not bool((zeros == _MIDDLE).all()):
        raise QuantizationError("has zero points, though its checkpoint is announced as symmetric")
    packed, halves = pack_nibbles(groups).flatten(1), _float16(scales)
    if symmetric:
        return QuantizedWeight(WeightFormat.Q4_0, shape, packed, halves)
    minimums = (zeros.float() * scales.float()).neg().half()
    if not bool(minimums.isfinite().all()):
        raise QuantizationError("holds values too large for float16")
    return QuantizedWeight(WeightFormat.Q4_1, shape, packed, halves, minimums)


def _awq_or_gptq(spec: QuantizationSpec, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[N, K]` and scales and zero points `[N, G]`; the tensors have N last."""
    words, zero_words = parts["qweight"], parts["qzeros"]
    if spec.layout == "awq":  # words along N, in an order of their own
        order = torch.tensor(_AWQ_ORDER)
        codes = _nibbles(words)[..., order].flatten(1).t()
        zeros = _nibbles(zero_words)[..., order].flatten(1).t()
    else:  # codes along K, zero points along N
        codes = _nibbles(words).permute(1, 0, 2).flatten(1)
        zeros = _nibbles(zero_words).flatten(1).t()
        if spec.zeros_less_one:
            zeros = (zeros + 1) & 15  # a zero point of 0 was stored as -1, that is 15
    shape = (codes.shape[0], codes.shape[1])
    return codes.contiguous(), _over_groups(parts["scales"].t(), shape), _over_groups(zeros, shape)


def _fp8(
    spec: QuantizationSpec, shape: tuple[int, int], parts: Mapping[str, Tensor], report: Report
) -> QuantizedWeight:
    codes = parts["weight"]
    scales = parts.get("weight_scale", parts.get("weight_scale_inv"))
    assert scales is not None, sorted(parts)
    if not bool(scales.isfinite().all()) or bool((codes.view(torch.uint8) & 127 == 127).any()):
        raise QuantizationError("holds values that are not finite")
    if spec.block is None:
        rows = scales.float().reshape(-1, 1).expand(shape[0], 1).contiguous()
        return QuantizedWeight(WeightFormat.FP8, shape, codes, rows)
    report.say(f"fp8 in blocks of {spec.block[0]} x {spec.block[1]} is held with a scale a row: rounded a second time")
    return _fp8_of_blocks(spec.block, shape, codes, scales.float())


def _fp8_of_blocks(block: tuple[int, int], shape: tuple[int, int], codes: Tensor, scales: Tensor) -> QuantizedWeight:
    """Some rows at a time: all of them as float32 would take four times the memory."""
    wide = scales.repeat_interleave(block[1], 1)[:, : shape[1]]
    held_codes, held_scales = torch.empty_like(codes), torch.empty(shape[0], 1)
    step = max(1, _CHUNK // (shape[1] * block[0])) * block[0]
    for start in range(0, shape[0], step):
        rows = slice(start, start + step)
        factors = wide[start // block[0] : -(-(start + step) // block[0])].repeat_interleave(block[0], 0)
        values = codes[rows].float() * factors[: codes[rows].shape[0]]
        chunk = METHODS["fp8"].quantize(values)
        held_codes[rows], held_scales[rows] = chunk.codes, chunk.scales
    return QuantizedWeight(WeightFormat.FP8, shape, held_codes, held_scales)


def _nibbles(words: Tensor) -> Tensor:
    """int32 `[.., W]` as uint8 `[.., W, 8]`, the lowest four bits first."""
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def _over_groups(scales: Tensor, shape: tuple[int, int]) -> Tensor:
    """A scale for each group of 32: `[N, G]`. scales: `[N, S]`, one a row `[N]` or `[N, 1]`, or one `[]` or `[1]`."""
    num_groups = -(-shape[1] // GROUP_SIZE)
    if scales.ndim < 2 or scales.shape[1] == 1:
        return scales.reshape(-1, 1).expand(shape[0], num_groups)
    return scales.repeat_interleave(num_groups // scales.shape[1], 1)


def _float16(scales: Tensor) -> Tensor:
    """Raises `QuantizationError` for what is not finite, or not in float16."""
    halves = scales.half()
    if not bool(halves.isfinite().all()):
        if not bool(scales.isfinite().all()):
            raise QuantizationError("holds values that are not finite")
        raise QuantizationError(f"has a scale of {float(scales.abs().amax()):.3g}, which overflows float16")
    return halves.contiguous()
