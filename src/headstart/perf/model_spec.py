"""What a model is, in numbers: the shape of a decoder, read from Hugging Face's config.json or GGUF metadata.

Owns `ModelSpec` and its reading. No torch: the control tower sizes and predicts with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from headstart.hub import ModelError, ModelFiles, read_json
from headstart.hub.gguf_reader import GGUFFile, gguf_reader
from headstart.perf.fields import Fields
from headstart.perf.quantization_spec import quantization_from_config
from headstart.perf.rope_spec import RopeSpec, rope_from_config, yarn_attention_factor

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "smollm3"]

_MAX_LAYERS = 10_000  # no model has as many: the file is damaged
_MAX_CONTEXT = 10_000_000  # tokens, as for the setting max_model_len


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. Counts are of elements, lengths of tokens.

    `max_position_embeddings` is what may be served: a checkpoint's sliding window lowers it, because attention here is
    over the whole context, which equals windowed attention only up to the window.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeSpec
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    no_rope_layers: tuple[int, ...] = ()  # layers without rotary embedding (SmolLM3)
    torch_dtype: str = "float32"  # the checkpoint's

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one layer."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        count = self.hidden_size * (q_size + 2 * kv_size) + q_size * self.hidden_size
        count += 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        count += (q_size + 2 * kv_size) * self.qkv_bias + self.hidden_size * self.o_bias
        count += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias + 2 * self.head_dim * self.qk_norm
        return count

    @property
    def num_parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * self.num_layer_parameters + self.hidden_size

    @property
    def attention_horizon(self) -> float:
        """Context length at which a token's attention costs as many FLOPs as its linear layers (LM head excluded)."""
        return self.num_layer_parameters / (2 * self.num_heads * self.head_dim)

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_element


def read_model_spec(files: ModelFiles) -> ModelSpec:
    """The specification of a model on disk. Raises `ModelError` for what is damaged, incomplete or not supported."""
    if files.format == "gguf":
        return spec_from_gguf(gguf_reader(files.weights[0]))
    assert files.config is not None, files
    return spec_from_config(read_json(files.config), str(files.config))


def spec_from_config(config: Mapping[str, Any], where: str) -> ModelSpec:
    """From the content of a config.json; `where` names it in errors."""
    fields = Fields(config, where)
    architecture = _architecture(config.get("model_type"), where)
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ModelError(f"{where}: hidden_act {act!r} is not supported (silu is)")
    quantization_from_config(config, where)  # one that is not supported is said first
    num_layers, num_heads = fields.count("num_hidden_layers", high=_MAX_LAYERS), fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    bias = fields.flag("attention_bias", False)
    window = _sliding_window(fields, architecture)
    rope = rope_from_config(config, where)
    max_positions = _stretched(fields.count("max_position_embeddings"), rope)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", num_heads),
        head_dim=fields.count("head_dim", 128 if architecture == "qwen3" else hidden_size // max(num_heads, 1)),
        max_position_embeddings=min(max_positions, window or max_positions),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        qkv_bias=architecture == "qwen2" or bias,
        o_bias=bias and architecture != "qwen2",
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=architecture == "qwen3",
        tie_word_embeddings=fields.flag("tie_word_embeddings", architecture == "smollm3"),
        sliding_window=window,
        no_rope_layers=_no_rope_layers(fields, num_layers) if architecture == "smollm3" else (),
        torch_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )
    return _checked(spec, where)


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    """From GGUF metadata (keys as in llama.cpp's gguf-py) and the names of its tensors."""
    where = str(file.path)
    name = file.require("general.architecture", str)
    architecture = _architecture(name, where)
    fields = Fields(
        {key.removeprefix(name + "."): value for key, value in file.metadata.items() if key.startswith(name + ".")},
        where,
    )
    if fields.count("expert_count", 0, low=0):
        raise ModelError(f"{where}: a mixture of experts is not supported")
    # Each layer has tensors: a damaged count must not become millions of names.
    num_layers = fields.count("block_count", high=len(file.tensors))
    num_heads = fields.count("attention.head_count")
    hidden_size = fields.count("embedding_length")
    head_dim = fields.count("attention.key_length", hidden_size // num_heads)
    if fields.count("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{where}: keys and values of different sizes are not supported")
    if fields.count("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{where}: partial rotary embedding is not supported")
    if (embeddings := file.tensors.get("token_embd.weight")) is None:
        raise ModelError(f"{where}: tensor token_embd.weight is missing")
    window = fields.count("attention.sliding_window", 0, low=0) or None
    trained = fields.count("context_length")
    rope = _gguf_rope(fields, trained, interleaved=architecture in ("llama", "mistral", "smollm3"))
    context = _stretched(trained, rope)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=embeddings.shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.count("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=min(context, window or context),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", 1e-6),
        rope=rope,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tie_word_embeddings="output.weight" not in file.tensors,
        sliding_window=window,
        no_rope_layers=tuple(range(3, num_layers, 4)) if architecture == "smollm3" else (),
        torch_dtype=_gguf_dtype(file),
    )
    return _checked(spec, where)


def _architecture(name: object, where: str) -> Architecture:
    for known in get_args(Architecture):
        if name == known:
            return known  # type: ignore[no-any-return]
    known_names = ", ".join(get_args(Architecture))
    raise ModelError(f"{where}: the architecture {name!r} is not supported (supported: {known_names})")


def _sliding_window(fields: Fields, architecture: Architecture) -> int | None:
    """The window, where any layer uses one. Qwen and SmolLM3 name a window that they use only if told to."""
    if architecture != "mistral" and not fields.flag("use_sliding_window", False):
        return None
    window = fields.count("sliding_window", 0, low=0)
    return window or None


def _stretched(max_positions: int, rope: RopeSpec) -> int:
    """The context with scaled rotary embedding, in tokens: configurations name it, or only the one before scaling.

    Llama 3's names the scaled one; so may yarn's, which also says what it was (`original_max_position_embeddings`).
    """
    original = {"yarn": rope.original_max_position_embeddings, "linear": max_positions}.get(rope.scaling, 0)
    return int(min(max(max_positions, original * rope.factor), _MAX_CONTEXT))


def _no_rope_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """SmolLM3: `no_rope_layers[i]` is 0 where layer i has *no* rotary embedding; default: each interval-th."""
    flags = fields.values.get("no_rope_layers")
    if flags is None:
        interval = fields.count("no_rope_layer_interval", 4)
        return tuple(range(interval - 1, num_layers, interval))
    if not isinstance(flags, list) or len(flags) != num_layers:
        raise ModelError(f"{fields.where}: no_rope_layers must be a list of {num_layers} flags")
    return tuple(layer for layer, has_rope in enumerate(flags) if not has_rope)


def _gguf_rope(fields: Fields, context: int, *, interleaved: bool) -> RopeSpec:
    """Llama 3's scaling is no metadata in GGUF: its factors are the tensor rope_freqs.weight (see the loader)."""
    theta = fields.number("rope.freq_base", 10_000.0)
    kind = fields.values.get("rope.scaling.type", "none")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return RopeSpec(theta=theta, scaling="linear", factor=factor, interleaved=interleaved)
    if kind == "yarn":
        return RopeSpec(
            theta=theta,
            scaling="yarn",
            factor=factor,
            original_max_position_embeddings=fields.count("rope.scaling.original_context_length", context),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=fields.number("rope.scaling.attn_factor", 1.0) * yarn_attention_factor(factor),
            interleaved=interleaved,
        )
    if kind != "none":
        raise ModelError(f"{fields.where}: rope scaling {kind!r} is not supported (linear and yarn are)")
    return RopeSpec(theta=theta, interleaved=interleaved)


def _gguf_dtype(file: GGUFFile) -> str:
    """The dtype that holds what the file's matrices hold: float16 for quantized blocks, whose scales are float16."""
    tensor = file.tensors.get("blk.0.attn_q.weight")
    return {"F32": "float32", "BF16": "bfloat16"}.get(tensor.type_name if tensor else "F32", "float16")


def _checked(spec: ModelSpec, where: str) -> ModelSpec:
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{where}: {spec.num_heads} query heads cannot share {spec.num_kv_heads} KV heads evenly")
    if spec.head_dim % 2:
        raise ModelError(f"{where}: head_dim is {spec.head_dim}; rotary embedding needs an even one")
    if spec.rms_norm_eps <= 0:
        raise ModelError(f"{where}: rms_norm_eps is {spec.rms_norm_eps}, it must be positive")
    return spec
