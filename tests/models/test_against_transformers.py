"""Logits against Hugging Face transformers: every family, every rope scaling, chunked over scattered blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headstart.hub import resolve
from headstart.models import load_model
from headstart.models.sources import open_source
from headstart.ops import KVFormat, TorchOps
from headstart.perf import read_model_spec
from headstart.perf.tensors import expected_tensors
from tests.models.tiny import VOCAB, chunked_logits, load, pool_for, reference, write_gguf_model

BLOCK = 4
NUM_TOKENS = 150
SCATTERED = [7, 3, 44, 45, 46, 2, 40, *range(8, 39)]  # runs, jumps, and the pool's last blocks never consecutive
CHUNKS = (1, 70, 2, 33, 5, 1, 1, 37)

# Long waves exist only with a small base: scalings then differ from each other within 150 positions.
ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_theta": 50.0},
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-all": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
}


def expected_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids.unsqueeze(0)).logits[0].float()


def difference(model: Any, folder: Path, ops: Any = None) -> float:
    """Largest absolute difference of any logit. The model's logits must be worth comparing."""
    model.save_pretrained(folder)
    ids = torch.randint(VOCAB, (NUM_TOKENS,), generator=torch.Generator().manual_seed(5))
    decoder = load(folder, ops)
    got = chunked_logits(decoder, ids, CHUNKS, SCATTERED, BLOCK, pool_for(decoder, 48, BLOCK))
    expected = expected_logits(model, ids)
    assert expected.std() > 0.1
    return float((got - expected).abs().max())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True}),
        ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    ],
)
def test_families_equal_transformers(family: str, overrides: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    model = reference(family, tie_word_embeddings=tied, **overrides)
    assert difference(model, tmp_path) < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_plain_torch_operations_equal_transformers(family: str, tmp_path: Path) -> None:
    assert difference(reference(family), tmp_path, TorchOps()) < 1e-4


@pytest.mark.parametrize("heads", [(4, 4, 16), (8, 1, 8), (2, 1, 64), (2, 2, 128), (5, 1, 10)])
def test_head_shapes_equal_transformers(heads: tuple[int, int, int], tmp_path: Path) -> None:
    num_heads, num_kv_heads, head_dim = heads
    model = reference(
        "llama", num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, head_dim=head_dim, hidden_size=40
    )
    assert difference(model, tmp_path) < 1e-4


@pytest.mark.parametrize("rope", sorted(ROPES))
def test_rope_scalings_equal_transformers(rope: str, tmp_path: Path) -> None:
    model = reference("llama", rope_parameters=ROPES[rope], head_dim=16)
    assert difference(model, tmp_path) < 1e-4


def test_within_the_sliding_window_windowed_attention_is_full_attention(tmp_path: Path) -> None:
    model = reference("mistral", sliding_window=NUM_TOKENS)
    assert difference(model, tmp_path) < 1e-4
    assert load(tmp_path).spec.max_position_embeddings == NUM_TOKENS


def test_half_precision_checkpoints_and_shards(tmp_path: Path) -> None:
    model = reference("llama")
    ids = torch.arange(40)
    for dtype in (torch.bfloat16, torch.float16):
        folder = tmp_path / str(dtype)
        model.to(dtype).save_pretrained(folder, max_shard_size="12KB")
        assert len(list(folder.glob("model-*.safetensors"))) > 1
        decoder = load(folder)
        got = chunked_logits(decoder, ids, [40], list(range(10)), BLOCK, pool_for(decoder, 12, BLOCK))
        expected = expected_logits(type(model).from_pretrained(folder, dtype=torch.float32), ids)
        assert float((got - expected).abs().max()) < 1e-4


def test_gguf_of_a_llama_gives_the_logits_of_its_safetensors(tmp_path: Path) -> None:
    model = reference("llama", tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "hf")
    ids = torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(1))
    decoders = [load(tmp_path / "hf"), load(write_gguf_model(tmp_path / "m.gguf", model))]
    logits = [chunked_logits(d, ids, [60], list(range(20)), BLOCK, pool_for(d, 20, BLOCK)) for d in decoders]
    assert torch.equal(logits[0], logits[1])


def test_gguf_of_qwen_is_not_permuted(tmp_path: Path) -> None:
    model = reference("qwen2")
    ids = torch.randint(VOCAB, (30,), generator=torch.Generator().manual_seed(1))
    decoder = load(write_gguf_model(tmp_path / "m.gguf", model, architecture="qwen2"))
    got = chunked_logits(decoder, ids, [30], list(range(8)), BLOCK, pool_for(decoder, 8, BLOCK))
    assert float((got - expected_logits(model, ids)).abs().max()) < 1e-4


def test_gguf_rope_factors_equal_the_llama3_scaling(tmp_path: Path) -> None:
    scaled = reference("llama", rope_parameters=ROPES["llama3"], head_dim=16)
    plain = reference("llama", rope_parameters={"rope_theta": 500.0, "rope_type": "default"}, head_dim=16)
    factors = plain.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq
    assert factors.max() > 2
    path = write_gguf_model(tmp_path / "m.gguf", scaled, extra={"rope_freqs.weight": factors.numpy()})
    decoder = load(path)
    ids = torch.randint(VOCAB, (100,), generator=torch.Generator().manual_seed(1))
    got = chunked_logits(decoder, ids, [100], list(range(25)), BLOCK, pool_for(decoder, 25, BLOCK))
    assert float((got - expected_logits(scaled, ids)).abs().max()) < 1e-4


def test_a_reduced_kv_pool_stays_close_to_the_full_one(tmp_path: Path) -> None:
    model = reference("llama")
    model.save_pretrained(tmp_path)
    ids = torch.arange(60)
    expected = expected_logits(model, ids)
    tolerances = {KVFormat.BFLOAT16: 0.2, KVFormat.FLOAT16: 0.03, KVFormat.INT8: 0.2, KVFormat.FP8: 0.5}
    for ops in (None, TorchOps()):
        decoder = load(tmp_path, ops)
        for kv_format, tolerance in tolerances.items():
            pool = pool_for(decoder, 20, BLOCK, kv_format)
            got = chunked_logits(decoder, ids, (33, 1, 26), [3, 2, 1, *range(4, 20)], BLOCK, pool)
            assert float((got - expected).abs().max()) < tolerance * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_stay_close_to_full_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    model = reference("qwen3")
    model.save_pretrained(tmp_path)
    decoder = load(tmp_path, dtype=dtype)
    ids = torch.arange(60)
    pool = pool_for(decoder, 20, BLOCK, KVFormat(str(dtype).removeprefix("torch.")))
    got = chunked_logits(decoder, ids, (33, 1, 26), [3, 2, 1, *range(4, 20)], BLOCK, pool)
    expected = expected_logits(model, ids)
    assert got.dtype == torch.float32
    assert float((got - expected).abs().mean()) < 0.03 * float(expected.abs().max())


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_default_model_chooses_as_transformers_on_300_positions() -> None:
    files = resolve("smollm2-135m")
    spec = read_model_spec(files)
    decoder = load_model(files, spec, device="cpu", dtype=torch.float32)
    source = open_source(files, spec)
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_position_embeddings,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device="cpu").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its table is no weight
    weights = {name: source.read(name) for name in expected_tensors(spec)}
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    ids = torch.randint(spec.vocab_size, (300,), generator=torch.Generator().manual_seed(8))
    pool = pool_for(decoder, 24, 16)
    got = chunked_logits(decoder, ids, (128, 1, 171), [5, 4, *range(6, 24)], 16, pool)
    expected = expected_logits(model, ids)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
