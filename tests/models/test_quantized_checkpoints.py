"""Quantized checkpoints in Hugging Face's layout as weight sources: tiny models, every matrix in codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.config import Quantization
from headstart.hub import ModelError, files_of_folder
from headstart.models import load_model
from headstart.models.sources import WeightSource, open_source
from headstart.ops.formats import QuantizedWeight, WeightFormat
from headstart.perf.checkpoint import read_checked_spec
from tests.fixtures.quantized_weights import LAYOUTS
from tests.models.tiny import chunked_logits, pool_for, reference

pytestmark = pytest.mark.usefixtures("_own_cache")

DOWN = "model.layers.1.mlp.down_proj"
QUERY = "model.layers.0.self_attn.q_proj"
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@pytest.fixture
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path_factory.mktemp("cache")))


def write(folder: Path, layout: str, family: str = "llama", **changes: Any) -> dict[str, np.ndarray[Any, Any]]:
    """A model whose linear layers are in codes, but for one; what they mean, by their names as floats."""
    model = reference(family, **(SIZES | changes))
    model.save_pretrained(folder)
    section, encode = LAYOUTS[layout]
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    meant = {}
    for name in [name for name in tensors if "_proj.weight" in name and "layers.1.mlp.up" not in name]:
        parts, meant[name] = encode(*tensors.pop(name).shape)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return meant


def opened(folder: Path) -> WeightSource:
    files = files_of_folder(folder)
    return open_source(files, read_checked_spec(files))


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors; a double underscore stands for a dot."""
    path = folder / "model.safetensors"
    held = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for name, tensor in tensors.items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    save_file(held, path, metadata={"format": "pt"})


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"fp8 a block"}))
def test_each_layout_is_read_from_its_tensors(layout: str, tmp_path: Path) -> None:
    meant = write(tmp_path, layout)
    source = opened(tmp_path)
    assert set(source.formats) == set(meant)
    for name, values in meant.items():
        matrix = source.read_matrix(name)
        assert isinstance(matrix, QuantizedWeight)
        assert matrix.format is source.formats[name]
        assert torch.equal(source.read(name), matrix.dequantize())
        assert np.abs(matrix.dequantize().numpy() - values).max() <= 1e-3 * np.abs(values).max()
        assert not source.is_rounded(name)
    plain = source.read_matrix("model.layers.1.mlp.up_proj.weight")
    assert isinstance(plain, torch.Tensor)
    assert plain.shape == (128, 64)
    assert source.num_bytes(f"{DOWN}.weight") < 64 * 128 * 4 / 2


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_model_computes_in_codes_what_it_computes_in_floats(layout: str, tmp_path: Path) -> None:
    """Nearly: with codes, activations are rounded to eight bits where the machine has instructions for that."""
    write(tmp_path, layout)
    files = files_of_folder(tmp_path)
    ids = torch.arange(40) * 7 % 96

    def logits(quantization: Quantization) -> torch.Tensor:
        decoder = load_model(
            files, read_checked_spec(files), device="cpu", dtype=torch.float32, quantization=quantization
        )
        return chunked_logits(decoder, ids, [40], [0, 1, 2], 16, pool_for(decoder, 4, 16))

    floats, coded = logits("none"), logits("auto")
    assert (coded - floats).norm() < 0.05 * (floats - floats.mean(1, keepdim=True)).norm()


def test_blocks_of_fp8_are_known_to_be_rounded(tmp_path: Path) -> None:
    meant = write(tmp_path, "fp8 a block")
    source = opened(tmp_path)
    assert all(source.is_rounded(name) for name in meant)
    assert not source.is_rounded("model.layers.1.mlp.up_proj.weight")
    matrix = source.read_matrix(f"{DOWN}.weight")
    assert isinstance(matrix, QuantizedWeight)
    assert matrix.format is WeightFormat.FP8


def test_biases_stay_floats(tmp_path: Path) -> None:
    write(tmp_path, "gptq", family="qwen2")
    source = opened(tmp_path)
    assert source.read(f"{QUERY}.bias").abs().min() > 0
    assert isinstance(source.read_matrix(f"{QUERY}.weight"), QuantizedWeight)


def test_gptq_may_have_biases_of_zeros_that_the_model_has_not(tmp_path: Path) -> None:
    write(tmp_path, "gptq")
    change(tmp_path, **{f"{DOWN}.bias": torch.zeros(64)})
    opened(tmp_path).read_matrix(f"{DOWN}.weight")
    change(tmp_path, **{f"{DOWN}.bias": torch.ones(64)})
    with pytest.raises(ModelError, match=rf"model\.safetensors: tensor {DOWN}\.weight has a bias that is not zero"):
        opened(tmp_path).read_matrix(f"{DOWN}.weight")


def test_what_calibration_left_behind_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, "fp8 a channel", tie_word_embeddings=True)
    extra = {
        "model.layers.0.self_attn.k_scale": torch.ones(1),
        "model.layers.1.self_attn.v_scale": torch.ones(1),
        f"{DOWN}.output_scale": torch.ones(1),
        "lm_head.weight": torch.zeros(96, 64).to(torch.float8_e4m3fn),
        "lm_head.weight_scale": torch.ones(96, 1),
    }
    change(tmp_path, **extra)
    opened(tmp_path)


@pytest.mark.parametrize(
    ("layout", "tensors", "message"),
    [
        ("awq", {f"{DOWN}.scales": None}, rf"tensor {DOWN}\.scales is missing"),
        ("awq", {f"{DOWN}.qweight": None}, rf"tensor {DOWN}\.weight is missing"),
        ("awq", {f"{DOWN}.qzeros": torch.zeros(2, 64).int()}, r"qzeros has shape \[2, 64\], expected \[2, 8\]"),
        ("awq", {f"{DOWN}.qweight": torch.zeros(128, 8)}, r"qweight has the unsupported dtype F32 \(I32 is\)"),
        ("awq", {f"{DOWN}.g_idx": torch.zeros(128).int()}, rf"unexpected tensor {DOWN}\.g_idx"),
        ("gptq", {f"{DOWN}.g_idx": torch.zeros(64).int()}, r"g_idx has shape \[64\], expected \[128\]"),
        ("int8 a group", {f"{DOWN}.weight_scale": torch.ones(64, 1)}, r"has shape \[64, 1\], expected \[64, 4\]"),
        ("int8 packed", {f"{DOWN}.weight_packed": torch.zeros(64, 16).int()}, r"weight_packed has shape \[64, 16\]"),
        ("fp8 a channel", {f"{DOWN}.weight_scale": torch.ones(64, 1).int()}, r"has the unsupported dtype I32"),
        ("fp8 a block", {f"{DOWN}.weight_scale_inv": torch.ones(64, 1)}, r"has shape \[64, 1\], expected \[1, 1\]"),
        ("fp8 a channel", {f"{DOWN}.weight": torch.zeros(64, 128).to(torch.float8_e5m2)}, "F8_E5M2|unexpected"),
        ("int8 a channel", {"model.norm.weight": torch.ones(64).to(torch.int8)}, r"has the unsupported dtype I8"),
    ],
)  # fmt: skip
def test_wrong_headers_are_named(layout: str, tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, layout)
    change(tmp_path, **tensors)
    with pytest.raises(ModelError, match=message) as caught:
        opened(tmp_path)
    assert "\n" not in str(caught.value)


def test_groups_that_do_not_divide_the_rows_are_named(tmp_path: Path) -> None:
    write(tmp_path, "awq")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["group_size"] = 96
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"tensor .*weight has 64 columns, no multiple of its groups' 96"):
        opened(tmp_path)


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    write(tmp_path, "int8 a channel")
    scale = torch.ones(64, 1, dtype=torch.float16)
    scale[9] = torch.nan
    change(tmp_path, **{f"{DOWN}.weight_scale": scale})
    with pytest.raises(
        ModelError, match=rf"model\.safetensors: tensor {DOWN}\.weight holds values that are not finite"
    ):
        opened(tmp_path).read_matrix(f"{DOWN}.weight")
