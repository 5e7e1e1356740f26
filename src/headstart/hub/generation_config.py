"""How a model's authors want it sampled: generation_config.json. Owns its reading; requests decide otherwise.

Only fields that shape the next token's distribution are read. `do_sample` is not, as in vLLM: files give temperatures
without it. End-of-sequence ids are the tokenizer's business (`headstart.text`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from headstart.hub.files import ModelError, ModelFiles, read_json

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 1 << 40),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets for sampling fields that it leaves out. As made: the OpenAI API's own defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def describe(self) -> str:
        """The fields that differ from the API's defaults, e.g. `temperature 0.6, top_p 0.9`; empty if none does."""
        values = ((item.name, getattr(self, item.name), item.default) for item in fields(self))
        return ", ".join(f"{name} {value:g}" for name, value, default in values if value != default)


def read_sampling_defaults(files: ModelFiles) -> SamplingDefaults:
    """From the model's generation_config.json; the API's defaults where it says nothing or is absent (GGUF).

    Raises `ModelError` for values that no request may have.
    """
    if files.generation_config is None:
        return SamplingDefaults()
    content = read_json(files.generation_config)
    found: dict[str, Any] = {}
    for name, (low, high) in _RANGES.items():
        value = content.get(name)
        if value is None:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not low <= value <= high or (name == "top_k" and value != int(value)):
            raise ModelError(
                f"{files.generation_config}: {name} is {value!r}, expected a number from {low:g} to {high:g}; "
                "correct it, or serve with --generation-config none"
            )
        found[name] = max(0, int(value)) if name == "top_k" else float(value)
    return SamplingDefaults(**found)
