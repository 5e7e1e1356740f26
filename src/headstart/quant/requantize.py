"""From the blocks of a GGUF file, and from one format to another, with as little rounding as there can be.

Owns which GGUF type is held in which format. Knows blocks, not files: https://github.com/ggml-org/ggml describes them.
Letters: N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from headstart.hub.gguf_reader import GGUFTensor
from headstart.ops.formats import GROUP_SIZE, QuantizedWeight, WeightFormat, concatenate
from headstart.quant.method import METHODS, QuantizationError, QuantMethod, pack_nibbles
from headstart.quant.report import Report

Blocks = npt.NDArray[np.void]

_CHUNK = 1 << 22  # values that are held as float32 at a time
_HALF = GROUP_SIZE // 2

# Blocks whose codes are taken as they are. V16 is 16 bytes that numpy copies as one: that is several times as fast.
_BLOCKS: Mapping[str, np.dtype[np.void]] = {
    "Q8_0": np.dtype([("scale", "<f2"), ("codes", "V32")]),
    "Q4_0": np.dtype([("scale", "<f2"), ("codes", "V16")]),
    "Q4_1": np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("codes", "V16")]),
    "Q5_0": np.dtype([("scale", "<f2"), ("fifths", "V4"), ("codes", "V16")]),
    "Q4_K": np.dtype([("factors", "<f2", 2), ("scales", "V12"), ("codes", "V128")]),
}

# GGUF type -> the format in which it is held. Types that are not here are floats.
GGUF_FORMATS: Mapping[str, WeightFormat] = {
    "Q8_0": WeightFormat.Q8_0,
    "Q4_0": WeightFormat.Q4_0,
    "Q4_1": WeightFormat.Q4_1,
    "Q4_K": WeightFormat.Q4_1,
    "Q5_0": WeightFormat.Q8_0,
    "Q5_1": WeightFormat.Q8_0,
    "Q5_K": WeightFormat.Q8_0,
    "Q6_K": WeightFormat.Q8_0,
}


def gguf_weight(tensor: GGUFTensor, report: Report) -> QuantizedWeight | None:
    """A GGUF tensor `[N, K]` in its native format, or None if it holds floats.

    Raises `QuantizationError` for numbers that are not finite: the file is damaged.
    """
    kind = tensor.type_name
    if kind not in GGUF_FORMATS:
        return None
    num_rows, num_columns = tensor.shape
    if kind in _TAKEN:
        weight = _TAKEN[kind](np.frombuffer(tensor.data, dtype=_BLOCKS[kind]), (num_rows, num_columns))
        _require_finite(weight)
    else:
        weight = _requantized(tensor, METHODS["int8"])
    if kind in _SAID:
        report.say(f"GGUF type {kind} is held as {GGUF_FORMATS[kind]}: {_SAID[kind]}")
    return weight


def as_format(weight: QuantizedWeight, target: WeightFormat) -> QuantizedWeight:
    """The same matrix in another format. From Q4_0 nothing is rounded; from others, once more."""
    if weight.format is target:
        return weight
    if weight.format is WeightFormat.Q4_0 and target is WeightFormat.Q4_1:
        minimums = weight.scales * -8.0
        if bool(minimums.isfinite().all()):
            return QuantizedWeight(target, weight.shape, weight.codes, weight.scales, minimums)
    if weight.format is WeightFormat.Q4_0 and target is WeightFormat.Q8_0:
        packed = weight.codes.view(weight.shape[0], -1, _HALF)
        codes = torch.cat((packed & 15, packed >> 4), -1).flatten(1).to(torch.int8) - 8
        return QuantizedWeight(target, weight.shape, codes, weight.scales)
    methods = [method for method in METHODS.values() if method.format is target]
    assert methods, f"nothing is quantized to {target}"
    return methods[0].quantize(weight.dequantize())


def in_one_format(parts: Sequence[Tensor | QuantizedWeight]) -> list[Tensor | QuantizedWeight]:
    """Matrices that are to be packed as one, in the smallest format that holds each about as well as its own.

    Floats if one of them is float.
    """
    codes = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(codes) < len(parts):
        return [part.dequantize() if isinstance(part, QuantizedWeight) else part for part in parts]
    formats = {part.format for part in codes}
    if len(formats) == 1:
        return list(codes)
    target = WeightFormat.Q4_1 if formats == {WeightFormat.Q4_0, WeightFormat.Q4_1} else WeightFormat.Q8_0
    return [as_format(part, target) for part in codes]


def gguf_floats(tensor: GGUFTensor) -> Tensor:
    """float32, shaped as the tensor, of any GGUF type that the `gguf` package reads."""
    raw = _bytes(tensor).reshape(*tensor.shape[:-1], -1)
    return torch.from_numpy(_dequantize(raw, tensor.type_id))


def _bytes(tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
    """The file itself, which may only be read."""
    return np.frombuffer(tensor.data, dtype=np.uint8)


def _dequantize(raw: npt.NDArray[np.uint8], type_id: int) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):  # what is not finite is reported by the tensor's name
        values = dequantize(raw, GGMLQuantizationType(type_id))
    return values if values.flags.writeable else values.copy()  # float32 is the file itself


def _requantized(tensor: GGUFTensor, method: QuantMethod) -> QuantizedWeight:
    """Through float32, some rows at a time: all of them would take four times the file's memory and more."""
    num_rows, num_columns = tensor.shape
    raw = _bytes(tensor).reshape(num_rows, -1)
    step = max(1, _CHUNK // num_columns)
    chunks = [raw[start : start + step] for start in range(0, num_rows, step)]
    return concatenate([method.quantize(torch.from_numpy(_dequantize(chunk, tensor.type_id))) for chunk in chunks])


def _q8_0(blocks: Blocks, shape: tuple[int, int]) -> QuantizedWeight:
    codes = _field(blocks, "codes", shape[0], torch.int8)
    return QuantizedWeight(WeightFormat.Q8_0, shape, codes, _field(blocks, "scale", shape[0], torch.float16))


def _q4_0(blocks: Blocks, shape: tuple[int, int]) -> QuantizedWeight:
    codes = _field(blocks, "codes", shape[0], torch.uint8)
    return QuantizedWeight(WeightFormat.Q4_0, shape, codes, _field(blocks, "scale", shape[0], torch.float16))


def _q4_1(blocks: Blocks, shape: tuple[int, int]) -> QuantizedWeight:
    codes = _field(blocks, "codes", shape[0], torch.uint8)
    scales = _field(blocks, "scale", shape[0], torch.float16)
    return QuantizedWeight(WeightFormat.Q4_1, shape, codes, scales, _field(blocks, "minimum", shape[0], torch.float16))


def _q5_0(blocks: Blocks, shape: tuple[int, int]) -> QuantizedWeight:
    """value = (code - 16) * scale; of the 32 codes of a block the fifth bits lie apart."""
    packed = _field(blocks, "codes", shape[0], torch.uint8).view(shape[0], -1, _HALF)
    bits = _field(blocks, "fifths", shape[0], torch.uint8).view(shape[0], -1, 4, 1)
    fifths = ((bits >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)
    codes = (torch.cat((packed & 15, packed >> 4), -1) | (fifths << 4)).to(torch.int8) - 16
    scales = _field(blocks, "scale", shape[0], torch.float16)
    return QuantizedWeight(WeightFormat.Q8_0, shape, codes.flatten(1), scales)


def _q4_k(blocks: Blocks, shape: tuple[int, int]) -> QuantizedWeight:
    """value = code * (d * s) - e * m, with d and e of a block, s and m of a group: only the products are rounded."""
    num_rows = shape[0]
    factors = _field(blocks, "factors", num_rows, torch.float16).view(num_rows, -1, 2).float()
    # Eight s and eight m of six bits each in three times four bytes.
    small, smaller, mixed = _field(blocks, "scales", num_rows, torch.uint8).view(num_rows, -1, 3, 4).unbind(-2)
    scales = torch.cat((small & 63, (mixed & 15) | ((small >> 2) & 48)), -1)
    minimums = torch.cat((smaller & 63, (mixed >> 4) | ((smaller >> 2) & 48)), -1)
    # 32 bytes hold two groups: one in the low halves, one in the high.
    pairs = _field(blocks, "codes", num_rows, torch.uint8).view(num_rows, -1, 4, GROUP_SIZE)
    codes = torch.stack((pairs & 15, pairs >> 4), -2)
    return QuantizedWeight(
        WeightFormat.Q4_1,
        shape,
        pack_nibbles(codes).flatten(1),
        (factors[..., :1] * scales).half().flatten(1),
        (factors[..., 1:] * minimums).neg().half().flatten(1),
    )


# Types whose codes are taken as they are.
_TAKEN: Mapping[str, Callable[[Blocks, tuple[int, int]], QuantizedWeight]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q4_K": _q4_k,
}
ROUNDED_GGUF_TYPES = frozenset(GGUF_FORMATS) - frozenset(_TAKEN)
_SAID = {
    "Q5_0": "the same values in more bytes",
    "Q4_K": "the same codes, with scales rounded to float16",
    "Q5_1": "rounded a second time",
    "Q5_K": "rounded a second time",
    "Q6_K": "rounded a second time",
}


def _field(blocks: Blocks, name: str, num_rows: int, dtype: torch.dtype) -> Tensor:
    """One field of all blocks, row by row: `[N, what a row holds]`."""
    return torch.from_numpy(blocks[name].copy().view(np.uint8)).view(dtype).view(num_rows, -1)


def _require_finite(weight: QuantizedWeight) -> None:
    for part in (weight.scales, weight.minimums):
        if part is not None and not bool(part.isfinite().all()):
            raise QuantizationError("holds values that are not finite")
