"""Reading a model's specification from config.json and GGUF metadata, and the numbers that follow from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.hub import ModelError, ModelFiles, files_of_gguf
from headstart.perf import ModelSpec, RopeSpec, read_model_spec
from headstart.perf.model_spec import spec_from_config
from headstart.perf.rope_spec import rope_from_config
from tests.fixtures.gguf_files import write_gguf

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def read(**overrides: Any) -> ModelSpec:
    return spec_from_config(LLAMA | overrides, "config.json")


def test_a_llama_config() -> None:
    assert read() == ModelSpec(
        architecture="llama",
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=10_000.0),
        torch_dtype="bfloat16",
    )


def test_null_counts_as_absent() -> None:
    absent = {
        "head_dim": None,
        "rope_scaling": None,
        "sliding_window": None,
        "attention_bias": None,
    }
    spec = read(num_key_value_heads=None, **absent)
    assert (spec.head_dim, spec.num_kv_heads) == (16, 4)


def test_what_each_family_adds() -> None:
    qwen2 = read(model_type="qwen2", tie_word_embeddings=True)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm, qwen2.tie_word_embeddings) == (True, False, False, True)
    qwen3 = read(model_type="qwen3", head_dim=32)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 32)
    assert read(model_type="smollm3", num_hidden_layers=9).no_rope_layers == (3, 7)
    assert read(model_type="smollm3", no_rope_layers=[1, 0, 1]).no_rope_layers == (1,)


def test_a_sliding_window_in_use_limits_the_context() -> None:
    mistral = read(model_type="mistral", sliding_window=500)
    assert (mistral.sliding_window, mistral.max_position_embeddings) == (500, 500)
    qwen = read(model_type="qwen2", sliding_window=500, use_sliding_window=False)
    assert (qwen.sliding_window, qwen.max_position_embeddings) == (None, 2048)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_in_the_old_and_the_new_form(key: str) -> None:
    old = key == "rope_scaling"
    outer: dict[str, Any] = {"rope_theta": 500.0} if old else {}
    inner: dict[str, Any] = {} if old else {"rope_theta": 500.0}
    kind = "type" if old else "rope_type"
    linear = rope_from_config(LLAMA | outer | {key: inner | {kind: "linear", "factor": 2}}, "c")
    assert linear == RopeSpec(theta=500.0, scaling="linear", factor=2.0)
    yarn = rope_from_config(LLAMA | outer | {key: inner | YARN | {kind: "yarn"}}, "c")
    assert (yarn.theta, yarn.scaling, yarn.original_max_position_embeddings) == (500.0, "yarn", 512)
    assert yarn.attention_factor == pytest.approx(1.1386294)
    plain = rope_from_config(LLAMA | outer | {key: inner | {kind: "default"}}, "c")
    assert plain == RopeSpec(theta=500.0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model_type": "gemma"}, r"the architecture 'gemma' is not supported \(supported: llama, mistral, qwen2"),
        ({"model_type": None}, r"the architecture None is not supported"),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config.*quant_method None"),
        ({"hidden_size": None}, r"hidden_size is missing"),
        ({"hidden_size": "64"}, r"hidden_size is '64', expected a whole number"),
        ({"num_key_value_heads": 3}, r"4 query heads cannot share 3 KV heads"),
        ({"head_dim": 15}, r"head_dim is 15; rotary embedding needs an even one"),
        ({"rms_norm_eps": 0}, r"rms_norm_eps is 0\.0, it must be positive"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps is nan, expected a number"),
        ({"num_hidden_layers": 3_000_000}, r"num_hidden_layers is 3000000, but at most 10000 can be"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings is 'yes', expected true or false"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope scaling 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, r"factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, r"rope scaling linear needs a positive factor"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "odd": 1}},
            r"rope scaling linear has the unknown parameter 'odd'",
        ),
        ({"rope_scaling": ["linear"]}, r"rope_scaling is no object"),
        ({"rope_theta": 0.5}, r"rope_theta is 0\.5, it must be above 1"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is not supported"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            r"rope scaling llama3 needs 0 < low_freq_factor < high_freq_factor",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, r"no_rope_layers must be a list of 3 flags"),
    ],
)
def test_refusals_name_the_file_and_the_field(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=r"^config\.json: " + message) as caught:
        read(**overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("max_positions", "scaling", "context"),
    [
        (512, YARN, 2048),  # Qwen's way: the context before scaling
        (2048, YARN, 2048),  # or the scaled one
        (512, {"type": "yarn", "factor": 4.0}, 2048),
        (512, {"type": "linear", "factor": 2.0}, 1024),
        (1 << 30, {"type": "linear", "factor": 1e300}, 10_000_000),
        (512, {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}, 512),
        (512, None, 512),
    ],
)
def test_a_stretched_context_may_be_used(max_positions: int, scaling: dict[str, Any] | None, context: int) -> None:
    assert read(max_position_embeddings=max_positions, rope_scaling=scaling).max_position_embeddings == context


GGUF = {
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 0.5,
    "llama.rope.freq_base": 500.0,
}


def gguf(tmp_path: Path, overrides: dict[str, Any] | None = None) -> ModelFiles:
    metadata = {key: value for key, value in (GGUF | (overrides or {})).items() if value is not None}
    tensors = {"token_embd.weight": np.ones((50, 32), np.float32), "blk.0.attn_q.weight": np.ones((32, 32), np.float16)}
    return files_of_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors))


def test_gguf_metadata(tmp_path: Path) -> None:
    spec = read_model_spec(gguf(tmp_path))
    assert spec == ModelSpec(
        architecture="llama",
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=0.5,
        rope=RopeSpec(theta=500.0, interleaved=True),
        tie_word_embeddings=True,
        torch_dtype="float16",
    )


def test_gguf_rope_scaling(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert read_model_spec(gguf(tmp_path, linear)).max_position_embeddings == 256
    assert read_model_spec(gguf(tmp_path, linear)).rope == RopeSpec(500.0, "linear", 4.0, interleaved=True)
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 16}
    rope = read_model_spec(gguf(tmp_path, linear | yarn)).rope
    assert (rope.scaling, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 16)
    assert rope.attention_factor == pytest.approx(1.1386294)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.value_length": 4}, "different sizes"),
        ({"llama.rope.dimension_count": 4}, "partial rotary embedding"),
        ({"llama.block_count": None}, "block_count is missing"),
        ({"llama.block_count": 3_000_000}, "block_count is 3000000, but at most 2 can be: the file is damaged"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"general.architecture": None, "llama.attention.head_count": 3}, "cannot share"),
    ],
)
def test_gguf_refusals(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_model_spec(gguf(tmp_path, overrides))


def test_numbers_of_smollm2() -> None:
    spec = ModelSpec("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, RopeSpec(), tie_word_embeddings=True)
    assert spec.num_parameters == 134_515_008  # as published
    assert spec.kv_bytes_per_token(4) == 46_080
    assert spec.attention_horizon == pytest.approx(3072, rel=0.01)
