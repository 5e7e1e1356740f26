"""Loading: every GGUF type, and one clear line for every way in which weights can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from headstart.hub import ModelError, files_of_folder, files_of_gguf
from headstart.models import load_model
from headstart.models.sources import open_source
from headstart.perf import read_model_spec
from tests.models.tiny import load, reference, write_gguf_model

QUANTIZED = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
K_QUANTS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where a block's float16 scales lie
UP = "blk.0.ffn_up.weight"
HF_UP = "model.layers.0.mlp.up_proj.weight"


def read(path: Path, name: str) -> torch.Tensor:
    files = files_of_gguf(path)
    return open_source(files, read_model_spec(files)).read(name)


def wide_model() -> Any:
    """Rows of 256, the block of the K-quants."""
    return reference("llama", hidden_size=256, num_attention_heads=4, num_hidden_layers=1)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_gguf_types_load_as_the_gguf_package_reads_them(kind: str, tmp_path: Path) -> None:
    model, quant = wide_model(), GGMLQuantizationType[kind]
    path = write_gguf_model(tmp_path / "m.gguf", model, kinds={UP: quant})
    weight = model.state_dict()[HF_UP].numpy()
    loaded = read(path, HF_UP)
    assert loaded.dtype == torch.float32
    assert np.array_equal(loaded.numpy(), dequantize(quantize(weight, quant), quant))
    assert float((loaded - torch.from_numpy(weight)).abs().max()) < 0.15 * float(np.abs(weight).max())


@pytest.mark.parametrize("kind", sorted(K_QUANTS))
def test_k_quants_load_as_the_gguf_package_reads_them(kind: str, tmp_path: Path) -> None:
    model, quant = wide_model(), GGMLQuantizationType[kind]
    rows = model.config.intermediate_size
    blocks = np.random.default_rng(1).integers(0, 256, (rows, GGML_QUANT_SIZES[quant][1]), dtype=np.uint8)
    for offset in K_QUANTS[kind]:
        blocks[:, offset : offset + 2] = np.full((rows, 1), 0.01, np.float16).view(np.uint8)
    loaded = read(write_gguf_model(tmp_path / "m.gguf", model, raw={UP: (blocks, quant)}), HF_UP)
    assert loaded.shape == (rows, 256)
    assert loaded.std() > 0
    assert np.array_equal(loaded.numpy(), dequantize(blocks, quant))


def test_an_unsupported_gguf_type_is_named(tmp_path: Path) -> None:
    quant = GGMLQuantizationType.Q2_K
    model = wide_model()
    blocks = np.zeros((model.config.intermediate_size, GGML_QUANT_SIZES[quant][1]), np.uint8)
    path = write_gguf_model(tmp_path / "m.gguf", model, raw={UP: (blocks, quant)})
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_up\.weight has the unsupported type Q2_K"):
        load(path)


def test_not_finite_gguf_weights_are_named(tmp_path: Path) -> None:
    model = reference("llama")
    model.state_dict()["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.inf
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.down_proj\.weight holds values that are not finite"):
        load(write_gguf_model(tmp_path / "m.gguf", model))


def test_a_truncated_gguf_file_is_damaged(tmp_path: Path) -> None:
    path = write_gguf_model(tmp_path / "m.gguf", reference("llama"))
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ModelError, match=r"is damaged: tensor output\.weight ends at byte .*truncated"):
        load(path)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    reference("llama", tie_word_embeddings=False).save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"tensor model\.norm\.weight is missing$"),
        (
            lambda t: [t.pop(n) for n in list(t) if ".q_proj" in n],
            r"layers\.0\.self_attn\.q_proj\.weight is missing \(and 1",
        ),
        (lambda t: t.update(extra=torch.ones(2)), r"unexpected tensor extra: this is another kind of model"),
        (
            lambda t: t.update({HF_UP: torch.ones(3, 4)}),
            r"tensor model\.layers\.0\.mlp\.up_proj\.weight has shape \[3, 4\], expected \[44, 36\]",
        ),
        (
            lambda t: t.update({HF_UP: t[HF_UP].to(torch.int8)}),
            r"tensor model\.layers\.0\.mlp\.up_proj\.weight has the unsupported dtype I8",
        ),
        (
            lambda t: t[HF_UP].view(-1)[7:8].fill_(torch.nan),
            r"tensor model\.layers\.0\.mlp\.up_proj\.weight holds values that are not finite in torch\.float32",
        ),
    ],
    ids=["missing", "several missing", "extra", "misshapen", "dtype", "nan"],
)
def test_wrong_safetensors_are_named(change: Any, message: str, saved: Path) -> None:
    rewrite(saved, change)
    with pytest.raises(ModelError, match=message) as caught:
        load(saved)
    assert "\n" not in str(caught.value)


def test_a_truncated_safetensors_file_is_damaged(saved: Path) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        load(saved)


def test_values_too_large_for_half_precision_are_refused(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors[HF_UP].view(-1)[:1].fill_(1e6))
    load(saved)
    with pytest.raises(ModelError, match=r"up_proj\.weight holds values that are not finite in torch\.float16"):
        load(saved, dtype=torch.float16)


def test_a_tied_checkpoint_may_hold_the_matrix_twice(tmp_path: Path) -> None:
    reference("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load(tmp_path).spec.tie_word_embeddings


def test_a_tensor_in_two_shards_is_refused(saved: Path) -> None:
    path = saved / "model.safetensors"
    tensors = load_file(path)
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, saved / "second.safetensors")
    weight_map = dict.fromkeys(tensors, "model.safetensors") | {"model.norm.weight": "second.safetensors"}
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight is in model\.safetensors too"):
        load(saved)


def test_progress_counts_all_bytes_once(saved: Path) -> None:
    calls: list[tuple[str, int, int | None]] = []
    files = files_of_folder(saved)
    spec = read_model_spec(files)
    load_model(
        files,
        spec,
        device="cpu",
        dtype=torch.float32,
        progress=lambda stage, done, total: calls.append((stage, done, total)),
    )
    done = [call[1] for call in calls]
    assert done == sorted(set(done))
    assert {(stage, total) for stage, _, total in calls} == {("load", 4 * spec.num_parameters)}
    assert done[-1] == 4 * spec.num_parameters
