"""What a model is, in numbers: the shape of a decoder, read from Hugging Face's config.json or GGUF metadata.

Owns `ModelSpec`; the readers are in `perf.spec_readers`. No torch: the control tower sizes and predicts with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "smollm3"]
RopeScaling = Literal["none", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. Fields past `factor` matter only to the scaling that names them.

    `interleaved`: the *checkpoint's* q/k rows pair dimension 2i with 2i+1 (GGUF's llama files); the loader permutes them,
    so that the model itself always pairs i with i + D/2.
    """

    theta: float = 10_000.0
    scaling: RopeScaling = "none"
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3, yarn: context the model was first trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    interleaved: bool = False


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
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

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
