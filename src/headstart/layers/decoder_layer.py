"""One layer of a decoder: attention and gated MLP, each behind a norm and added to what came in."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headstart.ops import AddLinear, AttentionStep, GatedMLP, NormLinear, Own


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights prepared by `Ops`, and which of the families' variations apply."""

    qkv: NormLinear  # queries, keys, values in one: [(H + 2K) * D, C]
    qk_norm: Own  # or None
    rotate: bool
    output: AddLinear
    mlp: GatedMLP

    def __call__(self, x: Tensor, step: AttentionStep, kv: Tensor) -> Tensor:
        """x: `[T, C]`, may be overwritten; kv: this layer's part of the pool. Returns `[T, C]`."""
        queries = step.rotate_and_write(self.qkv(x), kv, rotate=self.rotate, qk_norm=self.qk_norm)
        x = self.output(step.attend(queries, kv), x)
        return self.mlp(x)
