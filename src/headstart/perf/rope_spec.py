"""Rotary position embedding, in numbers: which base, which scaling. Owns `RopeSpec` and its reading; computes nothing.

The scalings are those of Hugging Face transformers: `linear`, `llama3` and `yarn` (https://arxiv.org/abs/2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headstart.hub import ModelError
from headstart.perf.fields import Fields

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
    fields = Fields({**config, **scaling}, where)
    theta = fields.number("rope_theta", 10_000.0)
    if theta <= 1.0:
        raise ModelError(f"{where}: rope_theta is {theta}, it must be above 1")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
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
    max_positions = int(fields.number("max_position_embeddings", 0))
    original = int(fields.number("original_max_position_embeddings", max_positions))
    if kind == "yarn" and scaling.get("factor") is None and original > 0:
        factor = max_positions / original
    else:
        factor = fields.number("factor")
    if factor <= 0 or (kind != "linear" and original <= 0):
        raise ModelError(f"{where}: rope scaling {kind} needs a positive factor and original_max_position_embeddings")
    if kind == "linear":
        return RopeSpec(theta=theta, scaling="linear", factor=factor)
    if kind == "llama3":
        return _llama3(fields, theta, factor, original)
    return _yarn(fields, theta, factor, original)


def _llama3(fields: Fields, theta: float, factor: float, original: int) -> RopeSpec:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if not 0 < low < high:
        raise ModelError(f"{fields.where}: rope scaling llama3 needs 0 < low_freq_factor < high_freq_factor")
    return RopeSpec(
        theta=theta,
        scaling="llama3",
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(fields: Fields, theta: float, factor: float, original: int) -> RopeSpec:
    mscale, all_dim = fields.number("mscale", 0.0), fields.number("mscale_all_dim", 0.0)
    if mscale and all_dim:
        attention = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, all_dim)
    else:
        attention = yarn_attention_factor(factor)
    return RopeSpec(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fields.number("beta_fast", 0.0) or 32.0,
        beta_slow=fields.number("beta_slow", 0.0) or 1.0,
        attention_factor=fields.number("attention_factor", attention),
        truncate=bool(fields.values.get("truncate", True)),
    )
