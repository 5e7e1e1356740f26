"""Rotary position embedding, in numbers: which base, which scaling. Owns `RopeSpec` and its reading; computes nothing.

The scalings are those of Hugging Face transformers: `linear`, `llama3` and `yarn` (https://arxiv.org/abs/2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headstart.hub import ModelError

RopeScaling = Literal["none", "linear", "llama3", "yarn"]

_INERT_KEYS = {"type", "rope_type", "rope_theta"}
_KNOWN_KEYS: dict[str, set[str]] = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
        "mscale_all_dim", "truncate",
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. Fields past `factor` matter only to the scaling that their comment names.

    `interleaved`: the *checkpoint's* q/k rows pair dimension 2i with 2i+1 (GGUF's llama files); the loader permutes
    them, so that the model itself always pairs i with i + D/2.
    """

    theta: float = 10_000.0
    scaling: RopeScaling = "none"
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3, yarn: the context that the model was first trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    truncate: bool = True  # yarn: the ramp begins and ends at whole dimensions
    interleaved: bool = False


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """How much yarn scales cos and sin for a context stretched by `factor`."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def rope_from_config(config: Mapping[str, Any], where: str) -> RopeSpec:
    """From a config.json, in the old form (`rope_theta`, `rope_scaling`) or the new one (`rope_parameters`).

    Raises `ModelError` for scalings and parameters that this package does not compute.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"{where}: rope_scaling is no object")
    numbers = _Numbers({**config, **scaling}, where)
    theta = numbers.get("rope_theta", 10_000.0)
    if theta <= 1.0:
        raise ModelError(f"{where}: rope_theta is {theta}, it must be above 1")
    if numbers.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{where}: partial_rotary_factor is not supported (only whole-head rotary embedding is)")
    kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
    if kind == "default":
        return RopeSpec(theta=theta)
    known = _KNOWN_KEYS.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise ModelError(f"{where}: rope scaling {kind!r} is not supported (linear, llama3 and yarn are)")
    unknown = sorted(key for key in scaling if key not in known | _INERT_KEYS | {"partial_rotary_factor"})
    if unknown:
        raise ModelError(f"{where}: rope scaling {kind} has the unknown parameter {unknown[0]!r}")
    max_positions = int(numbers.get("max_position_embeddings", 0))
    original = int(numbers.get("original_max_position_embeddings", max_positions))
    if kind == "yarn" and scaling.get("factor") is None and original > 0:
        factor = max_positions / original
    else:
        factor = numbers.require("factor")
    if factor <= 0 or (kind != "linear" and original <= 0):
        raise ModelError(f"{where}: rope scaling {kind} needs a positive factor and original_max_position_embeddings")
    if kind == "linear":
        return RopeSpec(theta=theta, scaling="linear", factor=factor)
    if kind == "llama3":
        return _llama3(numbers, theta, factor, original)
    return _yarn(numbers, theta, factor, original)


def _llama3(numbers: _Numbers, theta: float, factor: float, original: int) -> RopeSpec:
    low, high = numbers.require("low_freq_factor"), numbers.require("high_freq_factor")
    if not 0 < low < high:
        raise ModelError(f"{numbers.where}: rope scaling llama3 needs 0 < low_freq_factor < high_freq_factor")
    return RopeSpec(
        theta=theta,
        scaling="llama3",
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(numbers: _Numbers, theta: float, factor: float, original: int) -> RopeSpec:
    mscale, all_dim = numbers.get("mscale", 0.0), numbers.get("mscale_all_dim", 0.0)
    if mscale and all_dim:
        attention = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, all_dim)
    else:
        attention = yarn_attention_factor(factor)
    return RopeSpec(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=numbers.get("beta_fast", 0.0) or 32.0,
        beta_slow=numbers.get("beta_slow", 0.0) or 1.0,
        attention_factor=numbers.get("attention_factor", attention),
        truncate=bool(numbers.values.get("truncate", True)),
    )


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Finite numbers of a JSON object; null counts as absent."""

    values: Mapping[str, Any]
    where: str

    def get(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ModelError(f"{self.where}: {key} is {value!r}, expected a number")
        return float(value)

    def require(self, key: str) -> float:
        if self.values.get(key) is None:
            raise ModelError(f"{self.where}: {key} is missing")
        return self.get(key, 0.0)
