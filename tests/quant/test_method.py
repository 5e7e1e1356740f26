"""The rules of int8, int4 and fp8: how far codes may be from what they stand for, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstart.ops.formats import QuantizedWeight, WeightFormat, concatenate
from headstart.quant.method import METHODS, QuantizationError

INT8, INT4, FP8 = METHODS["int8"], METHODS["int4"], METHODS["fp8"]
SUBNORMAL = 2.0**-24  # float16's smallest step
RELATIVE = 2.0**-11  # float16's precision


@st.composite
def matrices(draw: st.DrawFn, low: int = -40, high: int = 12) -> Tensor:
    """Odd sizes, many magnitudes, groups and rows of zeros, constant groups."""
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 150))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    exponents = torch.randint(low, high + 1, (rows, -(-columns // 32)), generator=generator).float()
    values = torch.randn(rows, columns, generator=generator).clamp(-4, 4) + draw(st.sampled_from([0.0, 0.0, 3.0]))
    values *= torch.exp2(exponents).repeat_interleave(32, 1)[:, :columns]
    kind = torch.randint(0, 8, exponents.shape, generator=generator).repeat_interleave(32, 1)[:, :columns]
    values[kind == 0] = 0.0
    values = torch.where(kind == 1, values[:, :1], values)
    return values.to(draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16])))


def groups_of(weight: Tensor) -> tuple[Tensor, ...]:
    return torch.split(weight.float(), 32, dim=1)


def steps(weight: QuantizedWeight) -> Tensor:
    """Each value's scale, float32 `[N, K]`."""
    return weight.scales.float().repeat_interleave(32, 1)[:, : weight.shape[1]]


@settings(max_examples=60, deadline=None)
@given(matrices())
def test_int8_is_within_half_a_step_of_every_weight(weight: Tensor) -> None:
    quantized = INT8.quantize(weight)
    assert quantized.format is WeightFormat.Q8_0
    assert quantized.shape == tuple(weight.shape)
    half = steps(quantized) / 2
    assert ((quantized.dequantize() - weight.float()).abs() <= half * (1 + 1e-6)).all()
    assert int(quantized.codes.abs().max()) <= 127
    for group, scale in zip(groups_of(weight), quantized.scales.float().unbind(1), strict=True):
        largest = group.abs().amax(1)
        assert (scale <= largest / 127 * (1 + RELATIVE) + SUBNORMAL).all(), "the step is as small as it can be"
        assert (scale[largest == 0] == 0).all()


def test_int8_has_the_codes_that_gguf_has_for_q8_0() -> None:
    """But where GGUF, which computes codes with the scale before it is rounded, is at a tie's other side."""
    weight = torch.randn(64, 320, generator=torch.Generator().manual_seed(1)) * 0.05
    blocks = quantize(weight.numpy(), GGMLQuantizationType.Q8_0).reshape(64, 10, 34)
    codes = blocks[..., 2:].copy().view(np.int8).reshape(64, 320)
    quantized = INT8.quantize(weight)
    assert np.array_equal(quantized.scales.numpy(), blocks[..., :2].copy().view(np.float16)[..., 0])
    difference = np.abs(quantized.codes.numpy().astype(int) - codes)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.05


def plain_int4(group: Tensor) -> Tensor:
    """The squared error of min and max rounded to float16, `[N]`."""
    low, high = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
    scale, minimum = ((high - low) / 15).half().float(), low.half().float()
    codes = ((group - minimum) / torch.where(scale > 0, scale, 1)).round().clamp(0, 15) * (scale > 0)
    return (codes * scale + minimum - group).square().sum(1)


@settings(max_examples=60, deadline=None)
@given(matrices())
def test_int4_is_never_worse_than_minimum_and_maximum(weight: Tensor) -> None:
    quantized = INT4.quantize(weight)
    assert quantized.format is WeightFormat.Q4_1
    values = quantized.dequantize()
    scales = quantized.scales.float().unbind(1)
    for group, back, scale in zip(groups_of(weight), groups_of(values), scales, strict=True):
        error, plain = (back - group).square().sum(1), plain_int4(group)
        floor = group.shape[1] * (group.abs().amax(1) * 1e-6).square()  # float32's own rounding
        # Among scales of a few of float16's smallest steps ours is rounded up, lest the largest weight is clamped.
        coarse = (scale <= 16 * SUBNORMAL) & (
            error <= group.shape[1] * (scale.clamp_min(SUBNORMAL) / 2 * 1.01).square()
        )
        assert (coarse | (error <= plain * (1 + 1e-4) + floor)).all()


def test_int4_lowers_the_error_on_weights_as_models_have_them() -> None:
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(2)) * 0.05
    error = (INT4.quantize(weight).dequantize() - weight).square().sum()
    plain = sum(plain_int4(group).sum() for group in groups_of(weight))
    assert error < 0.9 * plain


@settings(max_examples=60, deadline=None)
@given(matrices(low=-120, high=100))
def test_fp8_is_as_near_as_three_bits_of_mantissa(weight: Tensor) -> None:
    quantized = FP8.quantize(weight)
    assert quantized.codes.dtype == torch.float8_e4m3fn
    assert tuple(quantized.codes.shape) == tuple(weight.shape)
    values, wide = quantized.dequantize(), weight.float()
    largest = wide.abs().amax(1, keepdim=True)
    assert ((values - wide).abs() <= wide.abs() / 16 + largest / 448 * 2.0**-10 * 1.01 + 1e-40).all()
    normal = largest.squeeze(1) > 1e-30
    assert (values.abs().amax(1)[normal] >= largest.squeeze(1)[normal] * (1 - 1e-6)).all(), "the largest is kept"


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("columns", [32, 33, 95])
def test_zeros_are_zeros(name: str, columns: int) -> None:
    weight = torch.zeros(3, columns)
    quantized = METHODS[name].quantize(weight)
    assert torch.equal(quantized.dequantize(), weight)
    assert not quantized.scales.any()
    assert not quantized.codes.view(torch.uint8).any()


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("column", [0, 37, 69])
def test_what_is_not_finite_is_refused(name: str, value: float, column: int) -> None:
    weight = torch.randn(5, 70)
    weight[3, column] = value
    with pytest.raises(QuantizationError, match=r"^holds values that are not finite$"):
        METHODS[name].quantize(weight)


@pytest.mark.parametrize(
    ("name", "value"), [("int8", 9e6), ("int8", -3e38), ("int4", -7e4), ("int4", 2e6), ("int4", 3e38)]
)
def test_a_scale_that_float16_cannot_hold_is_refused(name: str, value: float) -> None:
    weight = torch.randn(4, 64)
    weight[2, 40] = value
    with pytest.raises(QuantizationError, match=r"^holds values up to .*, too large to quantize"):
        METHODS[name].quantize(weight)


def test_the_largest_values_that_float16_scales_can_hold() -> None:
    weight = torch.tensor([[127.0 * 65504, -127.0 * 65504, *[0.0] * 30]])
    assert torch.equal(INT8.quantize(weight).dequantize(), weight)
    weight = torch.tensor([[65504.0, -65504.0, *[0.0] * 30]])
    assert (INT4.quantize(weight).dequantize() - weight).abs().max() <= 65504 / 15 * 1.01


def test_values_below_every_scale_stay_within_its_smallest_step() -> None:
    for exponent in range(-60, -14):
        weight = torch.linspace(-1, 1, 64).reshape(2, 32) * 2.0**exponent
        for method in (INT8, INT4):
            step = method.quantize(weight)
            error = (step.dequantize() - weight).abs().max()
            assert error <= max(SUBNORMAL, float(step.scales.float().max())) / 2 * 1.5, (method.name, exponent)


def test_codes_do_not_depend_on_the_other_rows() -> None:
    weight = torch.randn(40, 100)
    for method in METHODS.values():
        whole = method.quantize(weight)
        parts = concatenate([method.quantize(part) for part in weight.split([7, 1, 32])])
        assert torch.equal(whole.codes.view(torch.uint8), parts.codes.view(torch.uint8))
        assert torch.equal(whole.scales, parts.scales)


def test_the_padding_of_a_last_group_has_zero_codes() -> None:
    weight = torch.full((2, 40), 3.0) + torch.arange(40) / 10
    packed = INT4.quantize(weight).codes.view(2, 2, 16)[:, 1]
    assert not (packed[:, 8:] & 15).any()
    assert not (packed >> 4).any()
    assert not INT8.quantize(weight).codes[:, 40:].any()
