"""The linear layers of a decoder as cases: its shapes and formats, made-up numbers, weights that no cache holds.

Reads headers only: how long a layer takes does not depend on what its weights are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from headstart.bench.kernel_report import Mix, Work
from headstart.hub import ModelFiles
from headstart.models.sources import open_source
from headstart.ops import Matrix, Ops, PackedMatrix, QuantizedWeight, RMSNorm, WeightFormat
from headstart.ops.formats import GROUP_SIZE
from headstart.perf.model_spec import ModelSpec
from headstart.perf.tensors import EMBEDDINGS, LM_HEAD, layer_tensor
from headstart.quant.method import METHODS
from headstart.quant.settle import settle_quantization

ROWS = (1, 16, 128, 512)
_Packed = TypeVar("_Packed", bound=PackedMatrix)
_MOST_COPIES = 1024  # of tiny matrices, which are in some cache anyway


@dataclass(frozen=True, slots=True)
class OperationCase:
    """A call of an operation, and what it does. `num_bytes`: that it reads from memory."""

    name: str
    rows: int
    format: str
    work: list[Work]
    num_bytes: float
    run: Callable[[], object]
    context: int | None = None


def mix_of(kind: WeightFormat) -> Mix:
    """What a matrix in this format is multiplied with: eight-bit floats and bfloat16 are widened to float32 first."""
    if kind is WeightFormat.Q8_0:
        return "int8"
    return "int4" if kind.grouped else "float32"


def matrix_formats(files: ModelFiles, spec: ModelSpec, ops: Ops) -> Mapping[str, WeightFormat]:
    """In what the server holds each operation's matrix by default, as the first layer has it."""
    own = open_source(files, spec).formats
    settled = settle_quantization("auto", set(own.values()), "cpu", ops.weight_formats)
    made = WeightFormat.FLOAT32 if settled.method is None else settled.method.format

    def held(*names: str) -> WeightFormat:
        kinds = {own[name] if own.get(name) in settled.keep else made for name in names}
        return kinds.pop() if len(kinds) == 1 else METHODS["int8"].format  # parts of several formats become one

    def of_layer(*modules: str) -> WeightFormat:
        return held(*(layer_tensor(0, f"{module}.weight") for module in modules))

    return {
        "qkv": of_layer("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "output": of_layer("self_attn.o_proj"),
        "gate_up": of_layer("mlp.gate_proj", "mlp.up_proj"),
        "down": of_layer("mlp.down_proj"),
        "LM head": held(EMBEDDINGS if spec.tie_word_embeddings else LM_HEAD),
    }


def made_up(kind: WeightFormat, num_rows: int, num_columns: int) -> Matrix:
    """A matrix of numbers near zero."""
    generator = torch.Generator().manual_seed(num_rows)
    if kind is WeightFormat.FLOAT32:
        return torch.randn(num_rows, num_columns, generator=generator) / 16
    if kind is WeightFormat.FP8:
        codes = torch.randint(0, 0x60, (num_rows, num_columns), dtype=torch.uint8, generator=generator)
        scales = torch.full((num_rows, 1), 1 / 64)
        return QuantizedWeight(kind, (num_rows, num_columns), codes.view(torch.float8_e4m3fn), scales)
    groups = -(-num_columns // GROUP_SIZE)
    size = (num_rows, groups * (GROUP_SIZE if kind is WeightFormat.Q8_0 else GROUP_SIZE // 2))
    octets = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    codes = octets.view(torch.int8).clamp(-127, 127) if kind is WeightFormat.Q8_0 else octets
    scales = torch.full((num_rows, groups), 1 / 64, dtype=torch.float16)
    minimums = scales * -7 if kind is WeightFormat.Q4_1 else None
    return QuantizedWeight(kind, (num_rows, num_columns), codes, scales, minimums)


def linear_cases(
    ops: Ops, spec: ModelSpec, formats: Mapping[str, WeightFormat], cold_bytes: int
) -> list[OperationCase]:
    """All operations at all numbers of rows. cold_bytes: of copies that are used in turn, more than the caches hold."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    attended = spec.num_heads * spec.head_dim
    norm = RMSNorm(torch.ones(hidden), 1e-5)
    shapes = {
        "qkv": (attended + 2 * spec.num_kv_heads * spec.head_dim, hidden),
        "output": (hidden, attended),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "LM head": (spec.vocab_size, hidden),
    }

    def plain(name: str) -> list[OperationCase]:
        num_outputs, num_inputs = shapes[name]
        matrix = made_up(formats[name], num_outputs, num_inputs)
        packed = _copies(lambda: ops.pack(matrix), cold_bytes)
        adds = name in ("output", "down")
        layers: Sequence[Callable[..., Tensor]]
        if adds:
            layers = [ops.add_linear(weight, None) for weight in packed]
        elif name == "LM head":
            layers = [ops.lm_head(norm, weight) for weight in packed]
        else:
            layers = [ops.norm_linear(norm, weight, None) for weight in packed]
        cases = []
        for rows in ROWS:
            inputs = [torch.randn(rows, num_inputs), *([torch.zeros(rows, num_outputs)] if adds else [])]
            work = [Work(mix_of(formats[name]), 2.0 * rows * num_outputs * num_inputs)]
            kind = str(formats[name])
            cases.append(OperationCase(name, rows, kind, work, packed[0].num_bytes, _in_turn(layers, inputs)))
        return cases

    layers = [case for name in ("qkv", "output", "gate_up", "down") for case in plain(name)]
    return [*layers, *_mlp_cases(ops, shapes, formats, cold_bytes), *plain("LM head")]


def _mlp_cases(
    ops: Ops, shapes: Mapping[str, tuple[int, int]], formats: Mapping[str, WeightFormat], cold_bytes: int
) -> list[OperationCase]:
    """gate_up and down in one, with norm, gate and residual: what a layer calls."""
    hidden, inner = shapes["down"]
    gate, down = made_up(formats["gate_up"], inner, hidden), made_up(formats["down"], hidden, inner)
    pairs = _copies(lambda: _Pair(ops.pack_gated(gate, gate), ops.pack(down)), cold_bytes)
    norm = RMSNorm(torch.ones(hidden), 1e-5)
    layers = [
        ops.gated_mlp(norm, pair.gate_up, pair.down, gate_bias=None, up_bias=None, down_bias=None) for pair in pairs
    ]
    kind = " + ".join(dict.fromkeys(str(formats[name]) for name in ("gate_up", "down")))
    cases = []
    for rows in ROWS:
        work = [
            Work(mix_of(formats[name]), 2.0 * rows * shapes[name][0] * shapes[name][1]) for name in ("gate_up", "down")
        ]
        run = _in_turn(layers, [torch.randn(rows, hidden)])
        cases.append(OperationCase("mlp", rows, kind, work, pairs[0].num_bytes, run))
    return cases


@dataclass(frozen=True, slots=True)
class _Pair:
    gate_up: PackedMatrix
    down: PackedMatrix

    @property
    def num_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes


def _copies(make: Callable[[], _Packed], cold_bytes: int) -> list[_Packed]:
    first = make()
    count = min(_MOST_COPIES, -(-cold_bytes // first.num_bytes))
    return [first, *(make() for _ in range(count - 1))]


def _in_turn(layers: Sequence[Callable[..., Tensor]], inputs: Sequence[Tensor]) -> Callable[[], Tensor]:
    upcoming = itertools.cycle(layers)
    return lambda: next(upcoming)(*inputs)
