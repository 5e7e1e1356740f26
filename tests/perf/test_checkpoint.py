"""What a checkpoint's headers tell: the same verdict as the engine's, before it and without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.hub import ModelError, ModelFiles, files_of_folder, files_of_gguf
from headstart.perf import read_model_spec
from headstart.perf.checkpoint import check_vocabulary, read_checked_spec
from headstart.perf.tensors import expected_tensors, gguf_name
from tests.fixtures.gguf_files import write_gguf

CONFIG = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
GGUF = {
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
}
UP = "model.layers.1.mlp.up_proj.weight"


def safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = int(np.prod(shape)) * {"F32": 4, "BF16": 2, "I8": 1}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def folder(tmp_path: Path, **changes: Any) -> ModelFiles:
    """A model in two shards; `changes`: tensor -> (dtype, shape), or None to leave it out."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    safetensors(tmp_path / "a.safetensors", {})
    spec = read_model_spec(files_of_folder(tmp_path))
    tensors: dict[str, Any] = {name: ("BF16", shape) for name, shape in expected_tensors(spec).items()} | changes
    kept = [(name, value) for name, value in tensors.items() if value is not None]
    safetensors(tmp_path / "a.safetensors", dict(kept[:9]))
    safetensors(tmp_path / "b.safetensors", dict(kept[9:]))
    return files_of_folder(tmp_path)


def gguf(tmp_path: Path, metadata: dict[str, Any] | None = None, **changes: Any) -> ModelFiles:
    base = {"token_embd.weight": np.ones((50, 32), np.float32)}
    path = tmp_path / "m.gguf"
    spec = read_model_spec(files_of_gguf(write_gguf(path, GGUF, base | {"blk.0.attn_q.weight": np.ones((32, 32))})))
    tensors: dict[str, Any] = (
        {gguf_name(name): np.ones((shape), np.float32) for name, shape in expected_tensors(spec).items()}
        | base
        | changes
    )
    kept = {name: value for name, value in tensors.items() if value is not None}
    return files_of_gguf(write_gguf(path, GGUF | (metadata or {}), kept))


def test_whole_models_pass(tmp_path: Path) -> None:
    unused = {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (2,)), "lm_head.weight": ("BF16", (10, 8))}
    assert read_checked_spec(folder(tmp_path, **unused)).num_layers == 2
    assert read_checked_spec(gguf(tmp_path, **{"rope_freqs.weight": np.ones(4, np.float32)})).num_layers == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({UP: None}, f"tensor {UP} is missing$"),
        ({UP: None, "model.norm.weight": None}, rf"tensor {UP} is missing \(and 1 more\)"),
        ({UP: ("BF16", (8, 16))}, rf"tensor {UP} has shape \[8, 16\], expected \[16, 8\]"),
        ({UP: ("I8", (16, 8))}, rf"tensor {UP} has the unsupported dtype I8 \(F32, F16, BF16 are\)"),
        ({"extra": ("F32", (1,))}, "unexpected tensor extra: this is another kind of model"),
    ],
)
def test_safetensors_that_do_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_checked_spec(folder(tmp_path, **changes))


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    files = folder(tmp_path)
    (tmp_path / "c.safetensors").write_bytes((tmp_path / "b.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"c\.safetensors: tensor .* is in b\.safetensors too"):
        read_checked_spec(files_of_folder(files.root))


def test_more_layers_than_tensors_are_told_at_once(tmp_path: Path) -> None:
    files = folder(tmp_path)
    assert files.config is not None
    files.config.write_text(json.dumps(CONFIG | {"num_hidden_layers": 9_999}))
    with pytest.raises(ModelError, match="9999 layers are announced, but there are only 20 tensors"):
        read_checked_spec(files)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.1.ffn_up.weight": None}, r"tensor blk\.1\.ffn_up\.weight is missing"),
        ({"blk.1.ffn_up.weight": np.ones((64, 16), np.float32)}, r"ffn_up\.weight has shape \[64, 16\]"),
        ({"blk.1.ffn_up.weight": np.ones((64, 32), np.int8)}, r"ffn_up\.weight has the unsupported type I8"),
        ({"rope_freqs.weight": np.ones(3, np.float32)}, r"rope_freqs\.weight has shape \[3\], expected \[4\]"),
    ],
)
def test_gguf_files_that_do_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_checked_spec(gguf(tmp_path, **changes))


def test_a_model_may_have_more_rows_than_its_tokenizer_has_tokens_but_not_fewer(tmp_path: Path) -> None:
    spec = read_checked_spec(folder(tmp_path))
    check_vocabulary(9, spec, "m")
    check_vocabulary(10, spec, "m")
    with pytest.raises(ModelError, match="the tokenizer has 11 tokens, but the model only 10"):
        check_vocabulary(11, spec, "m")
