"""Which tensors a checkpoint of each family holds, by Hugging Face's names, and what GGUF calls them.

Owns names and shapes; reads nothing.
"""

from __future__ import annotations

from headstart.perf.model_spec import ModelSpec

EMBEDDINGS = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

GGUF_ROPE_FACTORS = "rope_freqs.weight"

_GGUF_TOP = {EMBEDDINGS: "token_embd.weight", FINAL_NORM: "output_norm.weight", LM_HEAD: "output.weight"}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def layer_tensor(layer: int, name: str) -> str:
    """Full name of a layer's tensor, e.g. `layer_tensor(0, "mlp.up_proj.weight")`."""
    return f"model.layers.{layer}.{name}"


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that the model needs, in the order in which they are best read."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    tensors: dict[str, tuple[int, ...]] = {EMBEDDINGS: (vocab, hidden)}
    layer_shapes = _layer_tensors(spec)
    for layer in range(spec.num_layers):
        tensors |= {layer_tensor(layer, name): shape for name, shape in layer_shapes.items()}
    tensors[FINAL_NORM] = (hidden,)
    if not spec.tie_word_embeddings:
        tensors[LM_HEAD] = (vocab, hidden)
    return tensors


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor."""
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF_LAYER[module]}.{kind}"


def _layer_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = spec.hidden_size, spec.intermediate_size, spec.head_dim
    query, kv = spec.num_heads * head, spec.num_kv_heads * head
    linears: dict[str, tuple[int, int, bool]] = {
        "self_attn.q_proj": (query, hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, query, spec.o_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    tensors: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    if spec.qk_norm:
        tensors |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    tensors["post_attention_layernorm.weight"] = (hidden,)
    for name, (rows, columns, biased) in linears.items():
        tensors[f"{name}.weight"] = (rows, columns)
        if biased:
            tensors[f"{name}.bias"] = (rows,)
    return tensors
