"""The rotary table: cos and sin of every position. Owns the scalings' arithmetic, as in Hugging Face transformers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headstart.perf.rope_spec import RopeSpec


class RotaryTable:
    """cos and sin of all positions a model may serve, `[max positions, D / 2]`, made once."""

    __slots__ = ("_cos", "_sin")

    def __init__(
        self, rope: RopeSpec, head_dim: int, num_positions: int, device: torch.device, factors: Tensor | None = None
    ) -> None:
        """factors: `[D / 2]`, divides the frequencies (GGUF's rope_freqs.weight)."""
        frequencies = inverse_frequencies(rope, head_dim)
        if factors is not None:
            frequencies = frequencies / factors
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
        scale = rope.attention_factor if rope.scaling == "yarn" else 1.0
        self._cos = (angles.cos() * scale).to(device)
        self._sin = (angles.sin() * scale).to(device)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[T, D / 2]` of positions `[T]`."""
        return self._cos[positions], self._sin[positions]


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians a position of each pair of dimensions, `[D / 2]` float32."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "llama3":
        return _llama3(rope, plain)
    if rope.scaling == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / plain
    turns = rope.original_max_position_embeddings / wavelengths  # full turns within the original context
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn(rope: RopeSpec, plain: Tensor, head_dim: int) -> Tensor:
    """Dimensions that turn often keep their frequency, those that turn rarely are stretched, a ramp lies between."""

    def dimension(turns: float) -> float:
        wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)
