"""What config.json says of a checkpoint's quantization: what is understood, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headstart.hub import ModelError, files_of_folder
from headstart.perf.quantization_spec import QuantizationSpec, quantization_from_config, read_quantization
from tests.fixtures.quantized_weights import LAYOUTS, compressed_config, compressed_group, config

AWQ = LAYOUTS["awq"][0]
GPTQ = LAYOUTS["gptq"][0]
INT8 = LAYOUTS["int8 a channel"][0]
INT8_GROUPS = compressed_group("int-quantized", 8, 32)["config_groups"]
MIXED = INT8 | {"config_groups": {**INT8_GROUPS, "group_1": INT8["config_groups"]["group_0"]}}


def read(section: Any) -> QuantizationSpec | None:
    return quantization_from_config({"quantization_config": section}, "config.json")


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("awq", QuantizationSpec("awq", "awq", group_size=64, symmetric=False)),
        ("gptq", QuantizationSpec("gptq", "gptq", group_size=64, symmetric=False, zeros_less_one=True)),
        ("gptq symmetric", QuantizationSpec("gptq", "gptq", group_size=32, zeros_less_one=True)),
        ("gptq v2", QuantizationSpec("gptq", "gptq", group_size=64, symmetric=False)),
        ("gptq a row", QuantizationSpec("gptq", "gptq", symmetric=False, zeros_less_one=True)),
        ("int8 a channel", QuantizationSpec("compressed-tensors", "int8")),
        ("int8 a group", QuantizationSpec("compressed-tensors", "int8", group_size=32)),
        ("int8 packed", QuantizationSpec("compressed-tensors", "int8-packed", group_size=64)),
        ("int4 packed", QuantizationSpec("compressed-tensors", "int4-packed", group_size=64)),
        ("int4 packed a channel", QuantizationSpec("compressed-tensors", "int4-packed")),
        (
            "int4 packed with zeros",
            QuantizationSpec("compressed-tensors", "int4-packed", group_size=64, symmetric=False),
        ),
        ("int4 packed with zeros a channel", QuantizationSpec("compressed-tensors", "int4-packed", symmetric=False)),
        ("fp8 a channel", QuantizationSpec("compressed-tensors", "fp8")),
        ("fp8 a tensor", QuantizationSpec("compressed-tensors", "fp8")),
        ("fp8 a scalar", QuantizationSpec("fp8", "fp8")),
        ("fp8 a block", QuantizationSpec("fp8", "fp8", block=(128, 128))),
    ],
)
def test_supported_layouts(name: str, spec: QuantizationSpec) -> None:
    assert read(LAYOUTS[name][0]) == spec


def test_every_fixture_is_covered() -> None:
    assert all(read(section) is not None for section, _ in LAYOUTS.values())


def test_blocks_of_compressed_tensors() -> None:
    section = compressed_config("float-quantized", 8, "float", "block", block_structure=[64, 128])
    assert read(section) == QuantizationSpec("compressed-tensors", "fp8", block=(64, 128))


def test_no_quantization(tmp_path: Path) -> None:
    for section in (None, {}, False):
        assert read(section) is None
    assert quantization_from_config({}, "config.json") is None
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": AWQ}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert read_quantization(files_of_folder(tmp_path)) == read(AWQ)


@pytest.mark.parametrize(
    ("section", "what"),
    [
        (config("bitsandbytes", load_in_4bit=True), "quant_method 'bitsandbytes'"),
        ({"bits": 4}, "quant_method None"),
        ({"quant_method": ["awq"]}, r"quant_method \['awq'\]"),
        (AWQ | {"bits": 3}, "awq with 3 bits"),
        (AWQ | {"bits": 8}, "awq with 8 bits"),
        (AWQ | {"version": "gemv"}, "awq version 'gemv'"),
        (AWQ | {"zero_point": False}, "awq without zero points"),
        (GPTQ | {"bits": 2}, "gptq with 2 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq checkpoint_format 'marlin'"),
        (config("fp8", fmt="e5m2"), "fp8 format 'e5m2'"),
        (compressed_group("pack-quantized", 3, 64), "format 'pack-quantized' with 3-bit int weights"),
        (compressed_config("nvfp4-pack-quantized", 4, "float", "tensor_group"), "format 'nvfp4-pack-quantized'"),
        (compressed_config("int-quantized", 8, "int", "channel", symmetric=False), "asymmetric 8-bit weights"),
        (
            compressed_config("pack-quantized", 4, "int", "tensor", symmetric=False),
            "asymmetric 4-bit weights with strategy 'tensor'",
        ),
        (compressed_config("int-quantized", 8, "int", "block"), "strategy 'block' with 8-bit int weights"),
        (compressed_group("float-quantized", 8, 64), "format 'float-quantized' with 8-bit int weights"),
        (INT8 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity format 'sparse-24-bitmask'"),
        (MIXED, "a mix of several weight schemes"),
    ],
)
def test_what_is_not_supported_is_named_with_what_is(section: dict[str, Any], what: str) -> None:
    with pytest.raises(ModelError, match=what) as caught:
        read(section)
    assert str(caught.value).startswith("config.json: quantization_config: ")
    assert "compressed-tensors" in str(caught.value)
    assert "gptq" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ("awq", "quantization_config is str, expected an object"),
        (AWQ | {"bits": "four"}, "bits is 'four', expected a whole number"),
        (AWQ | {"group_size": 0}, "group_size is 0, expected a whole number of at least 1"),
        (AWQ | {"group_size": 48}, r"group_size 48 is not supported \(multiples of 32 are\)"),
        (AWQ | {"group_size": 1 << 40}, "at most 1048576 can be"),
        (GPTQ | {"sym": "yes"}, "sym is 'yes', expected true or false"),
        (INT8 | {"config_groups": {}}, "config_groups is no object with at least one group"),
        (INT8 | {"config_groups": {"group_0": {"weights": None}}}, "a config group says nothing of its weights"),
        (config("fp8", weight_block_size=[128]), r"the block of the weights is \[128\]"),
        (config("fp8", weight_block_size=[128, 0]), r"the block of the weights is \[128, 0\]"),
    ],
)
def test_what_is_damaged_is_named(section: Any, what: str) -> None:
    with pytest.raises(ModelError, match=what):
        read(section)
