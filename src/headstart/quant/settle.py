"""Which matrices are kept as they are, and how the others are quantized: the decision, from settings and facts alone.

Pure: reads no file and asks no machine.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from headstart.config import ConfigError, Device, Quantization
from headstart.ops.formats import WeightFormat
from headstart.quant.method import METHODS, QuantMethod


@dataclass(frozen=True, slots=True)
class SettledQuantization:
    """What to do with a matrix: keep it if its format is in `keep`, else quantize by `method`, else make it floats."""

    keep: frozenset[WeightFormat] = frozenset()
    method: QuantMethod | None = None


def settle_quantization(
    choice: Quantization, checkpoint: Collection[WeightFormat], device: Device, computable: Collection[WeightFormat]
) -> SettledQuantization:
    """checkpoint: the formats of its quantized matrices, none if all are floats. computable: what this machine computes
    with, without kernels of our own nothing.

    Raises `ConfigError`, naming what can be had, for a choice that this machine cannot compute with, or that would
    round anew what can be kept.
    """
    possible, own = frozenset(computable), frozenset(checkpoint)
    if choice == "none":
        return SettledQuantization()
    if choice == "auto":
        if own:
            return SettledQuantization(keep=own & possible)
        method = METHODS["int8"]
        return SettledQuantization(method=method if device == "cpu" and method.format in possible else None)
    if own and own <= possible:
        formats = ", ".join(sorted(own))
        raise ConfigError(
            f"quantization is {choice}, but the checkpoint is quantized already ({formats}): "
            "auto keeps it so, none makes it floats"
        )
    method = METHODS[choice]
    if method.format not in possible:
        choices = [name for name, other in METHODS.items() if other.format in possible]
        possible_choices = ", ".join(["auto", "none", *choices])
        raise ConfigError(f"quantization {choice} cannot be computed with on {device} here: use {possible_choices}")
    return SettledQuantization(keep=own & possible, method=method)
