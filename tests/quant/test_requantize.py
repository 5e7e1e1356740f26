"""GGUF blocks against the gguf package's own reading of them, and one format in another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from headstart.hub.gguf_reader import GGUFTensor
from headstart.ops.formats import WeightFormat
from headstart.quant.method import METHODS, QuantizationError
from headstart.quant.report import Report
from headstart.quant.requantize import GGUF_FORMATS, as_format, gguf_floats, gguf_weight, in_one_format

SCALES = {
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
}


def blocks(kind: str, rows: int = 6, columns: int = 512, seed: int = 1) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Every code and every six-bit scale at random; float16 factors as models have them."""
    rng = np.random.default_rng(seed)
    per_block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (rows, columns // per_block, num_bytes), dtype=np.uint8)
    for offset in SCALES[kind]:
        factors = (rng.normal(size=raw.shape[:2]) * 0.01).astype(np.float16)
        raw[..., offset : offset + 2] = factors[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def tensor(kind: str, raw: np.ndarray[Any, np.dtype[np.uint8]]) -> GGUFTensor:
    quant = GGMLQuantizationType[kind]
    per_block, num_bytes = GGML_QUANT_SIZES[quant]
    shape = (raw.shape[0], raw.shape[1] // num_bytes * per_block)
    return GGUFTensor("t", shape, int(quant), kind, raw.nbytes, memoryview(raw.tobytes()), 0)


def truth(kind: str, raw: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
    return torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind]))


@pytest.mark.parametrize(("kind", "said"), [("Q8_0", False), ("Q4_0", False), ("Q4_1", False), ("Q5_0", True)])
@pytest.mark.parametrize("shape", [(1, 32), (6, 512), (5, 96)])
def test_blocks_that_a_format_can_hold_are_held_exactly(kind: str, said: bool, shape: tuple[int, int]) -> None:
    raw = blocks(kind, *shape)
    report = Report()
    weight = gguf_weight(tensor(kind, raw), report)
    assert weight is not None
    assert weight.format is GGUF_FORMATS[kind]
    assert torch.equal(weight.dequantize(), truth(kind, raw))
    assert bool(report.lines) is said


def test_q4_k_keeps_its_codes() -> None:
    raw = blocks("Q4_K")
    weight = gguf_weight(tensor("Q4_K", raw), Report())
    assert weight is not None
    assert weight.format is WeightFormat.Q4_1
    scales = weight.scales.float().repeat_interleave(32, 1)
    minimums = weight.minimums.float().repeat_interleave(32, 1)
    rounding = (15 * scales.abs() + minimums.abs()) * 2.0**-11
    assert ((weight.dequantize() - truth("Q4_K", raw)).abs() <= rounding).all()


@pytest.mark.parametrize("kind", ["Q5_1", "Q5_K", "Q6_K"])
def test_other_types_are_rounded_to_the_nearest_of_eight_bits(kind: str) -> None:
    raw, report = blocks(kind), Report()
    weight = gguf_weight(tensor(kind, raw), report)
    assert weight is not None
    assert weight.format is WeightFormat.Q8_0
    steps = weight.scales.float().repeat_interleave(32, 1)
    assert ((weight.dequantize() - truth(kind, raw)).abs() <= steps / 2 * (1 + 1e-6)).all()
    gguf_weight(tensor(kind, raw), report)
    assert len(report.lines) == 1, "a kind is reported once, not a tensor"
    assert kind in report.lines[0]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_floats_are_floats(kind: str) -> None:
    values = np.random.default_rng(3).normal(size=(4, 64)).astype(np.float32)
    raw = quantize(values, GGMLQuantizationType[kind]).view(np.uint8).reshape(4, -1)
    assert gguf_weight(tensor(kind, raw), Report()) is None
    assert torch.equal(gguf_floats(tensor(kind, raw)), torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind])))


@pytest.mark.parametrize("kind", sorted(SCALES))
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_is_refused(kind: str, value: float) -> None:
    raw = blocks(kind)
    per_block = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    offset = per_block * 1 + SCALES[kind][-1]
    raw[3, offset : offset + 2] = np.array([value], np.float16).view(np.uint8)
    with pytest.raises(QuantizationError, match="not finite"):
        gguf_weight(tensor(kind, raw), Report())


def test_q4_0_is_the_same_in_the_other_formats() -> None:
    weight = gguf_weight(tensor("Q4_0", blocks("Q4_0")), Report())
    assert weight is not None
    for target in (WeightFormat.Q4_0, WeightFormat.Q4_1, WeightFormat.Q8_0):
        other = as_format(weight, target)
        assert other.format is target
        assert torch.equal(other.dequantize(), weight.dequantize())


def test_matrices_of_different_formats_become_one() -> None:
    four = gguf_weight(tensor("Q4_0", blocks("Q4_0", 3, 64)), Report())
    one = gguf_weight(tensor("Q4_1", blocks("Q4_1", 2, 64)), Report())
    eight = gguf_weight(tensor("Q8_0", blocks("Q8_0", 4, 64)), Report())
    assert four is not None
    assert one is not None
    assert eight is not None
    exact = in_one_format([four, one])
    assert [part.format for part in exact] == [WeightFormat.Q4_1] * 2
    for found, part in zip(exact, (four, one), strict=True):
        assert torch.equal(found.dequantize(), part.dequantize())
    mixed = in_one_format([eight, one, four])
    assert [part.format for part in mixed] == [WeightFormat.Q8_0] * 3
    again = METHODS["int8"].quantize(one.dequantize()).dequantize()
    for found, wanted in zip(mixed, (eight.dequantize(), again, four.dequantize()), strict=True):
        assert torch.equal(found.dequantize(), wanted)
    dense = torch.ones(2, 64, dtype=torch.bfloat16)
    floats = in_one_format([dense, four])
    assert floats[0] is dense
    assert torch.equal(floats[1], four.dequantize())
