"""Each public layout of quantized weights against an encoder written from its description."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from headstart.ops.formats import QuantizedWeight, WeightFormat
from headstart.perf.quantization_spec import QuantizationSpec, quantization_from_config
from headstart.quant.checkpoints import checkpoint_format, decode
from headstart.quant.method import QuantizationError
from headstart.quant.report import Report
from tests.fixtures.quantized_weights import LAYOUTS, compressed_int, gptq

READ = {
    "weight",
    "weight_scale",
    "weight_scale_inv",
    "weight_packed",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight_zero_point",
}
EXACT = {WeightFormat.Q8_0, WeightFormat.Q4_0, WeightFormat.FP8}


def spec_of(name: str) -> QuantizationSpec:
    spec = quantization_from_config({"quantization_config": LAYOUTS[name][0]}, "config.json")
    assert spec is not None
    return spec


def decoded(
    name: str, parts: dict[str, Tensor], shape: tuple[int, int], report: Report | None = None
) -> QuantizedWeight:
    return decode(spec_of(name), shape, {k: v for k, v in parts.items() if k in READ}, report or Report())


@pytest.mark.parametrize("name", sorted(set(LAYOUTS) - {"fp8 a block"}))
@pytest.mark.parametrize("shape", [(8, 64), (40, 192), (264, 128)])
def test_a_layout_is_read_as_it_is_meant(name: str, shape: tuple[int, int]) -> None:
    parts, meant = LAYOUTS[name][1](*shape)
    report = Report()
    weight = decoded(name, parts, shape, report)
    assert weight.shape == shape
    assert weight.format is checkpoint_format(spec_of(name))
    values = weight.dequantize().numpy()
    if weight.format in EXACT:
        assert np.array_equal(values, meant.astype(np.float32))
    else:  # the minimum, a product of scale and zero point, is rounded to float16, and their sum to float32
        bound = 15 * weight.scales.float().repeat_interleave(32, 1).numpy() * (2.0**-11 + 2.0**-20)
        assert (np.abs(values - meant) <= bound).all()
    assert report.lines == ()


@pytest.mark.parametrize("shape", [(8, 64), (130, 192), (256, 320)])
def test_fp8_in_blocks_is_rounded_once_more_and_says_so(shape: tuple[int, int]) -> None:
    parts, meant = LAYOUTS["fp8 a block"][1](*shape)
    report = Report()
    weight = decoded("fp8 a block", parts, shape, report)
    assert weight.format is WeightFormat.FP8
    largest = np.abs(meant).max(1, keepdims=True)
    assert (np.abs(weight.dequantize().numpy() - meant) <= np.abs(meant) / 16 + largest / 448 * 2.0**-10).all()
    assert len(report.lines) == 1


@pytest.mark.parametrize(("bits", "name"), [(8, "int8 packed"), (4, "int4 packed a channel")])
@pytest.mark.parametrize("columns", [35, 41, 63])
def test_rows_that_do_not_fill_their_last_word(bits: int, name: str, columns: int) -> None:
    parts, meant = compressed_int(5, columns, bits=bits, packed=True)
    spec = QuantizationSpec("compressed-tensors", spec_of(name).layout)
    weight = decode(spec, (5, columns), {k: v for k, v in parts.items() if k in READ}, Report())
    assert np.array_equal(weight.dequantize().numpy(), meant.astype(np.float32))


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_are_refused(name: str, value: float) -> None:
    parts, _ = LAYOUTS[name][1](16, 128)
    scale = next(part for part in parts if "scale" in part and part != "input_scale")
    parts[scale].view(-1)[-1] = value
    with pytest.raises(QuantizationError, match="not finite"):
        decoded(name, parts, (16, 128))


def test_an_fp8_code_that_is_no_number_is_refused() -> None:
    parts, _ = LAYOUTS["fp8 a channel"][1](16, 64)
    parts["weight"].view(torch.uint8)[7, 9] = 0xFF
    with pytest.raises(QuantizationError, match="not finite"):
        decoded("fp8 a channel", parts, (16, 64))


def test_reordered_columns_are_refused() -> None:
    parts, _ = gptq(16, 128, 64, v2=True)
    parts["g_idx"] = parts["g_idx"].flip(0)
    with pytest.raises(QuantizationError, match=r"reordered by activation \(desc_act\).* made with desc_act false"):
        decoded("gptq v2", parts, (16, 128))


@pytest.mark.parametrize("part", ["bias", "weight_zero_point"])
def test_what_is_not_read_must_say_nothing(part: str) -> None:
    parts, _ = compressed_int(16, 64)
    spec = spec_of("int8 a channel")
    kept = {k: v for k, v in parts.items() if k in READ}
    decode(spec, (16, 64), kept | {part: torch.zeros(16)}, Report())
    with pytest.raises(QuantizationError, match=f"has a {part} that is not zero"):
        decode(spec, (16, 64), kept | {part: torch.eye(16)[3]}, Report())


def test_zero_points_of_a_checkpoint_that_says_it_has_none() -> None:
    """As with a checkpoint whose format is not the one that is announced: its weights would be garbage."""
    parts, _ = gptq(16, 64, 32, symmetric=True, v2=True)
    with pytest.raises(QuantizationError, match="announced as symmetric"):
        decoded("gptq symmetric", parts, (16, 64))


def test_scales_in_other_types_cost_one_part_in_two_thousand() -> None:
    parts, meant = compressed_int(16, 64)
    wide = parts["weight_scale"].float() * 1.0003
    weight = decoded("int8 a channel", parts | {"weight_scale": wide}, (16, 64)).dequantize().numpy()
    assert (np.abs(weight - meant * 1.0003) <= np.abs(meant) / 2000).all()
    assert not np.array_equal(weight, meant)
    coarse = parts["weight_scale"].bfloat16()  # fewer digits than float16: exact
    exact = decoded("int8 a channel", parts | {"weight_scale": coarse}, (16, 64)).dequantize()
    assert torch.equal(exact, parts["weight"].float() * coarse.float())


@pytest.mark.parametrize("scale", [1e-7, 2e-7, 9e-7, 3e-6, 2e-5])
def test_scales_that_float16_hardly_holds_keep_values_within_its_step(scale: float) -> None:
    parts, _ = compressed_int(16, 64)
    scales = torch.full((16, 1), scale)
    scales[5] = 0.01  # other rows keep their codes
    weight = decoded("int8 a channel", parts | {"weight_scale": scales}, (16, 64))
    meant = parts["weight"].float() * scales
    assert torch.equal(weight.codes[5], parts["weight"][5])
    error = (weight.dequantize() - meant).abs().amax(1)
    assert (error[torch.arange(16) != 5] <= max(scale, 2.0**-24) * 0.76).all()


@pytest.mark.parametrize("name", ["awq", "gptq symmetric", "int8 a channel", "int4 packed"])
def test_a_scale_too_large_for_float16_is_refused(name: str) -> None:
    parts, _ = LAYOUTS[name][1](16, 128)
    scale = "scales" if "scales" in parts else "weight_scale"
    parts[scale] = parts[scale].float()
    parts[scale].view(-1)[3] = 1e5
    with pytest.raises(QuantizationError, match=r"a scale of 1e\+05, which overflows float16"):
        decoded(name, parts, (16, 128))
