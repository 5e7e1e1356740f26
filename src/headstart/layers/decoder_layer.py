"""One layer of a decoder: attention and gated MLP, each behind a norm and added to what came in."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headstart.ops import AttentionStep, GatedLinear, HeadShape, Linear, Norm


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights prepared by `Ops`, and which of the families' variations apply."""

    heads: HeadShape
    attention_norm: Norm
    qkv: Linear  # queries, keys, values in one: [(H + 2K) * D, C]
    qk_norm: Norm | None  # over each head of queries and keys
    rotate: bool
    output: Linear
    mlp_norm: Norm
    gate_up: GatedLinear
    down: Linear

    def __call__(self, x: Tensor, step: AttentionStep, keys: Tensor, values: Tensor) -> Tensor:
        """x: `[T, C]`; keys, values: this layer's, `[K, N * S, D]`. Returns `[T, C]`."""
        qkv = self.qkv(self.attention_norm(x))
        if self.qk_norm is not None:
            size = self.heads.rotated_size
            by_head = qkv[:, :size].unflatten(-1, (-1, self.heads.head_dim))
            by_head.copy_(self.qk_norm(by_head))
        queries = step.rotate_and_write(qkv, keys, values, rotate=self.rotate)
        x = self.output.add(step.attend(queries, keys, values), x)
        return self.down.add(self.gate_up(self.mlp_norm(x)), x)
