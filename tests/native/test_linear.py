"""The native linear layers: against plain torch in every weight format, and to the bit in any company.

Activations of grouped formats are rounded to 8 bits, so those are compared within what that rounding can do; everything
else within float32's.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstart import _native as native
from headstart.ops import QuantizedWeight, RMSNorm, TorchOps, WeightFormat
from headstart.ops.native_ops import NativeOps
from headstart.quant.method import Fp8, Int4, Int8, pack_nibbles

SETS = native.instruction_sets()
FORMATS = list(WeightFormat)
EPS = 1e-5


def random_numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_format(kind: WeightFormat, weight: Tensor) -> Tensor | QuantizedWeight:
    if kind is WeightFormat.Q4_0:  # no method makes it: GGUF files have it
        rows, columns = weight.shape
        groups = -(-columns // 32)
        codes = (random_numbers(rows + columns, rows, groups, 32).mul(3).round() + 8).clamp(0, 15).to(torch.uint8)
        scales = random_numbers(columns, rows, groups).abs().half() / 8
        return QuantizedWeight(kind, (rows, columns), pack_nibbles(codes).flatten(1), scales)
    methods = {WeightFormat.Q8_0: Int8(), WeightFormat.Q4_1: Int4(), WeightFormat.FP8: Fp8()}
    return methods[kind].quantize(weight) if kind in methods else weight


def dense(weight: Tensor | QuantizedWeight) -> Tensor:
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def ops_for(kind: WeightFormat, threads: int = 2, instruction_set: str = "") -> NativeOps:
    floats = WeightFormat.BFLOAT16 if kind is WeightFormat.BFLOAT16 else WeightFormat.FLOAT32
    return NativeOps(threads, matrix_format=floats, instruction_set=instruction_set)


def allowed(kind: WeightFormat, weight: Tensor, x: Tensor) -> Tensor:
    """How far a product may be off, `[rows, outputs]`: half a step of 8-bit activations a column, or rounding."""
    absolute = x.abs() @ weight.abs().T
    if kind is WeightFormat.BFLOAT16:
        return absolute * 2**-8 + 1e-6
    if not kind.grouped:
        return absolute * 2**-18 + 1e-6
    groups = torch.nn.functional.pad(x.abs(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32)).amax(2)
    steps = (groups / 63.5).repeat_interleave(32, 1)[:, : x.shape[1]]  # a pair of equal numbers halves the range
    return steps @ weight.abs().T * 0.5 + absolute * 2**-18 + 1e-6


sizes = st.tuples(st.integers(1, 70), st.integers(1, 130), st.integers(1, 100))


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=25, deadline=None)
@given(size=sizes, biased=st.booleans(), threads=st.integers(1, 3), seed=st.integers(0, 1000))
@example(size=(1, 1, 1), biased=True, threads=1, seed=0)
@example(size=(48, 576, 40), biased=False, threads=2, seed=1)
def test_products_are_those_of_torch(
    kind: WeightFormat, instruction_set: str, size: tuple[int, int, int], biased: bool, threads: int, seed: int
) -> None:
    outputs, inputs, rows = size
    weight = in_format(kind, random_numbers(seed, outputs, inputs))
    x, bias = random_numbers(seed + 1, rows, inputs) * 3, random_numbers(seed + 2, outputs) if biased else None
    ops = ops_for(kind, threads, instruction_set)
    packed = ops.pack(weight)
    residual = random_numbers(seed + 3, rows, outputs)
    expected = residual.double() + x.double() @ dense(weight).double().T + (0 if bias is None else bias.double())
    got = ops.add_linear(packed, bias)(x, residual.clone())
    assert bool(((got - expected).abs() <= allowed(kind, dense(weight), x)).all())


@pytest.mark.parametrize("kind", FORMATS)
def test_a_norm_before_and_views_that_are_not_dense(kind: WeightFormat) -> None:
    weight = in_format(kind, random_numbers(1, 37, 90))
    norm = RMSNorm(random_numbers(2, 90), EPS)
    wide = random_numbers(3, 11, 123)
    x = wide[:, 17:107]
    ops = ops_for(kind)
    got = ops.norm_linear(norm, ops.pack(weight), None)(x)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * norm.weight
    assert bool(((got - normed @ dense(weight).T).abs() <= allowed(kind, dense(weight), normed) + 1e-5).all())
    assert torch.equal(got, ops.lm_head(norm, ops.pack(weight))(x.contiguous()))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", [(64, 96, 5), (30, 45, 40), (16, 17, 1), (576, 1536, 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_gated_mlp_is_that_of_torch(kind: WeightFormat, shape: tuple[int, int, int], biased: bool) -> None:
    hidden, width, rows = shape
    gate, up = (in_format(kind, random_numbers(seed, width, hidden)) for seed in (1, 2))
    down = in_format(kind, random_numbers(3, hidden, width))
    biases = {
        name: random_numbers(seed, size) if biased else None
        for name, seed, size in (("gate_bias", 4, width), ("up_bias", 5, width), ("down_bias", 6, hidden))
    }
    norm, x = RMSNorm(random_numbers(7, hidden), EPS), random_numbers(8, rows, hidden)
    results = []
    for ops in (ops_for(kind), TorchOps()):
        mlp = ops.gated_mlp(norm, ops.pack_gated(gate, up), ops.pack(down), **biases)
        results.append(mlp(x.clone()))
    error = float((results[0] - results[1]).norm() / results[1].norm())
    assert error < (0.03 if kind.grouped else 0.01 if kind is WeightFormat.BFLOAT16 else 1e-5)


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_row_is_the_same_to_the_bit_in_any_company(kind: WeightFormat, data: st.DataObject) -> None:
    rows = data.draw(st.integers(2, 150))
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    weight = in_format(kind, random_numbers(1, 3 * 16 + 5, 70))
    gate, up, down = (
        in_format(kind, random_numbers(seed, *size)) for seed, size in ((2, (40, 70)), (3, (40, 70)), (4, (70, 40)))
    )
    x = random_numbers(5, rows, 70)
    norm = RMSNorm(random_numbers(6, 70), EPS)
    found = []
    for threads, some in ((1, x), (data.draw(st.integers(1, 4)), x[first:last])):
        ops = ops_for(kind, threads)
        product = ops.norm_linear(norm, ops.pack(weight), None)(some)
        mlp = ops.gated_mlp(
            norm, ops.pack_gated(gate, up), ops.pack(down), gate_bias=None, up_bias=None, down_bias=None
        )
        found.append((product, mlp(some.clone())))
    assert torch.equal(found[0][0][first:last], found[1][0])
    assert torch.equal(found[0][1][first:last], found[1][1])


@pytest.mark.skipif("amx" not in SETS, reason="no matrix unit")
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind.grouped])
@settings(max_examples=40, deadline=None)
@given(size=st.tuples(st.integers(1, 70), st.integers(1, 700), st.integers(1, 100)), threads=st.integers(1, 3))
def test_the_matrix_unit_gives_what_vectors_give_to_the_bit(
    kind: WeightFormat, size: tuple[int, int, int], threads: int
) -> None:
    outputs, inputs, rows = size
    weight, x = in_format(kind, random_numbers(1, outputs, inputs)), random_numbers(2, rows, inputs)
    found = []
    for name in ("avx512", "amx"):
        ops = ops_for(kind, threads, name)
        found.append(ops.add_linear(ops.pack(weight), None)(x, torch.zeros(rows, outputs)))
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", FORMATS)
def test_embeddings_are_the_rows_rounded_once(kind: WeightFormat) -> None:
    table = in_format(kind, random_numbers(1, 50, 70))
    ops = ops_for(kind)
    ids = torch.tensor([49, 0, 17, 17, 3] * 5)
    expected = dense(table)[ids]
    if kind is WeightFormat.BFLOAT16:
        expected = expected.bfloat16().float()
    torch.testing.assert_close(ops.embeddings(ops.pack(table))(ids), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", FORMATS)
def test_parts_lie_under_each_other(kind: WeightFormat) -> None:
    parts = [in_format(kind, random_numbers(seed, rows, 40)) for seed, rows in ((1, 5), (2, 27), (3, 16))]
    ops = ops_for(kind)
    x = random_numbers(4, 3, 40)
    together = ops.add_linear(ops.pack(*parts), None)(x, torch.zeros(3, 48))
    apart = [ops.add_linear(ops.pack(part), None)(x, torch.zeros(3, part.shape[0])) for part in parts]
    assert torch.equal(together, torch.cat(apart, 1))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_visible_and_in_its_row(kind: WeightFormat, bad: float) -> None:
    """A wrong number must not come out as a sound one, or the request would go on with nonsense."""
    weight = in_format(kind, random_numbers(1, 20, 70))
    x = random_numbers(2, 5, 70)
    clean = ops_for(kind)
    norm = RMSNorm(torch.ones(70), EPS)
    expected = clean.norm_linear(norm, clean.pack(weight), None)(x).clone()
    for column in (0, 33, 69):
        poisoned = x.clone()
        poisoned[2, column] = bad
        got = clean.norm_linear(norm, clean.pack(weight), None)(poisoned)
        assert not bool(got[2].isfinite().any())
        assert torch.equal(got[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30])
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind.grouped])
def test_activations_of_any_size(kind: WeightFormat, scale: float) -> None:
    weight, x = in_format(kind, random_numbers(1, 20, 64)), random_numbers(2, 5, 64)
    ops = ops_for(kind)
    linear = ops.add_linear(ops.pack(weight), None)
    got = linear(x * scale, torch.zeros(5, 20)) / scale
    expected = linear(x, torch.zeros(5, 20))
    if scale == 1e-38:  # too small for a scale with an inverse: counts as zero
        assert bool((got.abs() <= expected.abs() + 1).all())
    else:
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.2)


def test_no_rows_are_no_work() -> None:
    ops = ops_for(WeightFormat.FLOAT32)
    linear = ops.norm_linear(RMSNorm(torch.ones(8), EPS), ops.pack(random_numbers(1, 4, 8)), None)
    assert linear(torch.empty(0, 8)).shape == (0, 4)


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="instruction set nonsense"):
        native.Runtime(1, [], "nonsense")
    with pytest.raises(ValueError, match="outputs and inputs"):
        native.PackedWeight(native.Format.Q8_0, 0, 5)
    runtime, weight = native.Runtime(1), native.PackedWeight(native.Format.FLOAT32, 4, 4)
    rows = torch.ones(17, 4)
    with pytest.raises(ValueError, match="do not fit"):
        weight.pack_floats(runtime, rows.data_ptr(), 17, 0, native.Placement.PLAIN)
