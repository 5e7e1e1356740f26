"""Matrices on their way to the decoder: kept, quantized or made floats, and the second start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from headstart.hub import ModelError, ModelFiles, files_of_folder, files_of_gguf
from headstart.models.matrices import MatrixReader
from headstart.models.sources import open_source
from headstart.ops.formats import QuantizedWeight, WeightFormat
from headstart.perf import ModelSpec, read_model_spec
from headstart.perf.tensors import expected_tensors, gguf_name
from headstart.quant.method import METHODS
from headstart.quant.settle import SettledQuantization
from tests.models.tiny import reference, write_gguf_model

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
DOWN = "model.layers.1.mlp.down_proj.weight"
INT8 = SettledQuantization(method=METHODS["int8"])
KEEP_ALL = SettledQuantization(keep=frozenset(WeightFormat))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quantized"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    reference("llama", **SIZES).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def matrices(spec: ModelSpec) -> list[str]:
    return [name for name, shape in expected_tensors(spec).items() if len(shape) == 2]


def load(files: ModelFiles, settled: SettledQuantization) -> dict[str, torch.Tensor | QuantizedWeight]:
    spec = read_model_spec(files)
    source, names = open_source(files, spec), matrices(spec)
    with MatrixReader(source, files, names, settled, source.read) as reader:
        return {name: reader.read(name) for name in names}


def codes(matrix: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    assert isinstance(matrix, QuantizedWeight)
    return matrix.codes.view(torch.uint8)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_floats_are_quantized_once_and_then_found(name: str, folder: Path, cache: Path) -> None:
    files, settled = files_of_folder(folder), SettledQuantization(method=METHODS[name])
    first = load(files, settled)
    (path,) = cache.glob("*.safetensors")
    inode = path.stat().st_ino
    second = load(files, settled)
    assert path.stat().st_ino == inode, "nothing was written again"
    for matrix, tensor in load_file(folder / "model.safetensors").items():
        if matrix in first:
            tables = name == "int4" and ("embed" in matrix or "lm_head" in matrix)  # they are kept in eight bits
            method = METHODS["int8" if tables else name]
            assert torch.equal(codes(first[matrix]), codes(method.quantize(tensor)))
            assert torch.equal(codes(first[matrix]), codes(second[matrix]))


def test_a_changed_checkpoint_is_quantized_anew(folder: Path, cache: Path) -> None:
    files = files_of_folder(folder)
    before = codes(load(files, INT8)[DOWN]).clone()
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors[DOWN] = -tensors[DOWN]
    save_file(tensors, path, metadata={"format": "pt"})
    after = codes(load(files, INT8)[DOWN])
    assert torch.equal(after.view(torch.int8), -before.view(torch.int8))
    assert len(list(cache.glob("*.safetensors"))) == 2


def test_without_a_method_floats_stay_and_nothing_is_kept(folder: Path, cache: Path) -> None:
    matrix = load(files_of_folder(folder), SettledQuantization())[DOWN]
    assert torch.equal(matrix, load_file(folder / "model.safetensors")[DOWN])
    assert not cache.exists()


def test_values_that_are_not_finite_are_named_and_nothing_is_kept(folder: Path, cache: Path) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors[DOWN][3, 5] = torch.inf
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"model: tensor {DOWN} holds values that are not finite"):
        load(files_of_folder(folder), INT8)
    assert not [left for left in cache.iterdir() if left.name != ".lock"]


def gguf(tmp_path: Path, kind: str) -> ModelFiles:
    quant = GGMLQuantizationType[kind]
    model = reference("llama", **SIZES)
    names = [gguf_name(name) for name in model.state_dict() if "_proj.weight" in name]
    return files_of_gguf(write_gguf_model(tmp_path / "m.gguf", model, kinds=dict.fromkeys(names, quant)))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_gguf_blocks_are_taken_as_they_are_with_rows_in_rotary_order(kind: str, tmp_path: Path, cache: Path) -> None:
    """Blocks lie along a row: permuting rows and quantizing them are free to change places."""
    model, quant = reference("llama", **SIZES), GGMLQuantizationType[kind]
    loaded = load(gguf(tmp_path, kind), KEEP_ALL)
    for name, weight in model.state_dict().items():
        if "_proj.weight" in name:
            matrix = loaded[name]
            assert isinstance(matrix, QuantizedWeight)
            assert np.array_equal(matrix.dequantize().numpy(), dequantize(quantize(weight.numpy(), quant), quant))
    assert isinstance(loaded["model.embed_tokens.weight"], torch.Tensor), "a float32 tensor of the file"
    assert not cache.exists(), "there was nothing to quantize"


def test_gguf_blocks_that_must_be_rounded_are_kept_on_disk(tmp_path: Path, cache: Path) -> None:
    files = gguf(tmp_path, "Q5_1")
    first, second = load(files, KEEP_ALL), load(files, KEEP_ALL)
    assert len(list(cache.glob("*.safetensors"))) == 1
    assert torch.equal(codes(first[DOWN]), codes(second[DOWN]))
    floats = load(files, SettledQuantization())[DOWN]
    step = first[DOWN].scales.float().repeat_interleave(32, 1)
    assert ((first[DOWN].dequantize() - floats).abs() <= step / 2 * 1.00001).all()


def test_formats_that_are_not_kept_are_made_floats_or_quantized_anew(tmp_path: Path) -> None:
    files = gguf(tmp_path, "Q4_0")
    floats = load(files, SettledQuantization(keep=frozenset({WeightFormat.Q8_0})))[DOWN]
    assert isinstance(floats, torch.Tensor)
    again = load(files, INT8)[DOWN]
    assert isinstance(again, QuantizedWeight)
    assert again.format is WeightFormat.Q8_0
    assert torch.equal(again.codes, METHODS["int8"].quantize(floats).codes)


def test_gguf_scales_that_are_not_finite_are_named(tmp_path: Path) -> None:
    files = gguf(tmp_path, "Q8_0")
    source = open_source(files, read_model_spec(files))
    tensor = source._file.tensors[gguf_name(DOWN)]
    content = bytearray(files.weights[0].read_bytes())
    content[tensor._start : tensor._start + 2] = np.array([np.nan], np.float16).tobytes()
    files.weights[0].write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.gguf: tensor blk\.1\.ffn_down\.weight holds values that are not finite"):
        load(files, KEEP_ALL)
