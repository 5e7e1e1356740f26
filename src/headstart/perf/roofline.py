"""What a step should cost, from the model's shape and the device's rates: where learning begins.

The roofline of Williams et al. (2009), part by part: matrices are read once a step and multiplied once a row, keys and
values once a token of context. Pure functions; knows no torch and measures nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from headstart.perf.cost_model import FEW_ROWS, Coefficients
from headstart.perf.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """`flops`: multiplications and additions a second in matrix products; `attention_flops` in attention; `bandwidth`
    in bytes a second; `overhead`: seconds that a step takes beside them."""

    name: str
    flops: float
    attention_flops: float
    bandwidth: float
    overhead: float


def cpu_device(threads: int) -> DeviceSpec:
    """A cautious guess of what server cores do with 8-bit operands; the first steps correct it."""
    return DeviceSpec(f"cpu-{threads}", threads * 80e9, threads * 50e9, min(threads, 8) * 10e9, 0.001)


def cuda_device(name: str) -> DeviceSpec:
    """A cautious guess of a data-centre GPU; the first steps correct it."""
    return DeviceSpec(name, 200e12, 100e12, 1.5e12, 0.004)


def roofline(spec: ModelSpec, device: DeviceSpec, *, weight_bytes: float, kv_bytes_per_token: float) -> Coefficients:
    """`weight_bytes` as they are held, `kv_bytes_per_token` over all layers."""
    layers = spec.num_layers * spec.num_layer_parameters
    attention = 4 * spec.num_layers * spec.num_heads * spec.head_dim / device.attention_flops
    row = 2 * layers / device.flops
    return Coefficients(
        step=device.overhead + weight_bytes / device.bandwidth,
        row=row,
        few_rows=row / FEW_ROWS,
        prefill_context=attention,
        decode_context=max(attention, kv_bytes_per_token / device.bandwidth),
        sample=2 * spec.vocab_size * spec.hidden_size / device.flops,
    )
