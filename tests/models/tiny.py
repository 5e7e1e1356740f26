"""Tiny random models of each family, made and saved by Hugging Face transformers, and steps over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from torch import Tensor

from headstart.hub import files_of_folder, files_of_gguf
from headstart.kv import KVPool
from headstart.models import Decoder, load_model
from headstart.ops import BatchLayout, ChunkSpan, KVFormat, Ops
from headstart.perf import read_model_spec
from headstart.perf.tensors import gguf_name

VOCAB = 96

_FAMILIES: dict[str, tuple[type, type]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
}


def reference(family: str, **overrides: Any) -> Any:
    """A transformers model with random weights and biases, the same for the same arguments."""
    make_config, make_model = _FAMILIES[family]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 36,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "attn_implementation": "eager",
    }
    torch.manual_seed(11)
    model = make_model(make_config(**(settings | overrides))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(4.0)  # scores and choices far from uniform
    return model


def load(path: Path, ops: Ops | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    files = files_of_gguf(path) if path.suffix == ".gguf" else files_of_folder(path)
    return load_model(files, read_model_spec(files), device="cpu", dtype=dtype, ops=ops)


def layout(chunks: Iterable[tuple[int, int, list[int]]], block_size: int) -> BatchLayout:
    """A step of chunks `(start, num_rows, block ids)`."""
    positions, slots, spans, row = [], [], [], 0
    for start, num_rows, block_ids in chunks:
        table = torch.tensor(block_ids)
        rows = torch.arange(start, start + num_rows)
        positions.append(rows)
        slots.append(table[rows // block_size] * block_size + rows % block_size)
        context = start + num_rows
        spans.append(ChunkSpan(row, num_rows, context, table[: -(-context // block_size)]))
        row += num_rows
    return BatchLayout(torch.cat(positions), torch.cat(slots), tuple(spans))


def pool_for(decoder: Decoder, num_blocks: int, block_size: int, kv_format: KVFormat = KVFormat.FLOAT32) -> KVPool:
    """A pool full of other requests' leftovers."""
    pool = KVPool(decoder.kv_layout(block_size, kv_format), decoder.spec.num_layers, num_blocks, "cpu")
    if not kv_format.scaled:
        pool.data.view(kv_format.dtype).normal_(generator=torch.Generator().manual_seed(3))
    return pool


def chunked_logits(
    decoder: Decoder, ids: Tensor, chunks: Iterable[int], block_ids: list[int], block_size: int, pool: KVPool
) -> Tensor:
    """Logits of every position, computed in chunks of the given sizes."""
    rows, start = [], 0
    for size in chunks:
        stop = min(start + size, len(ids))
        if start == stop:
            break
        step = layout([(start, stop - start, block_ids)], block_size)
        rows.append(decoder.logits(decoder.forward(ids[start:stop], step, pool)))
        start = stop
    assert start == len(ids)
    return torch.cat(rows)


def write_gguf_model(
    path: Path,
    model: Any,
    *,
    architecture: str = "llama",
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
    raw: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, float | str | int] | None = None,
) -> Path:
    """A transformers model as llama.cpp's converter writes it: q and k permuted for llama, types as asked by GGUF name.

    `raw`: bytes and type of a tensor, in place of the model's own.
    """
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in (metadata or {}).items():
        {float: writer.add_float32, str: writer.add_string, int: writer.add_uint32}[type(value)](key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target, values = gguf_name(name), tensor.float().numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = _interleaved(values, config.head_dim)
        if target in (raw or {}):
            data, kind = (raw or {})[target]
            writer.add_tensor(target, data, raw_dtype=kind)
            continue
        kind = (kinds or {}).get(target, GGMLQuantizationType.F32)
        writer.add_tensor(target, quantize(values, kind), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleaved(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows i and i + D/2 of each head become 2i and 2i+1."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))
