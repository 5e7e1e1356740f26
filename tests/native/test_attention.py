"""Rotary embedding, the write of keys and values, and paged attention, against float64 and to the bit.

ATTENTION_ISA names another instruction set (portable, avx2, avx512) than this machine's best. ATTENTION_BUILDS=1
also runs the last tests, which take minutes: sanitizers, the portable kernels, NEON in an emulator.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.native.attention_driver import (
    BASE_FLAGS,
    FLAGS,
    FORMATS,
    NATIVE,
    SANITIZE,
    Kernels,
    Shape,
    Span,
    best_isa,
    build,
    slots_of,
)

ISA = os.environ.get("ATTENTION_ISA", best_isa())
EXAMPLES = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
THREADS = (1, 2, 5)
BLOCK_SIZES = (1, 2, 7, 16, 17, 32, 48, 64, 80, 256)
# Of a stored value, relative to it (float formats) or to the largest of its vector (scaled formats).
STORED_TOLERANCE = {"float32": 1e-6, "float16": 2**-11, "bfloat16": 2**-8, "int8": 0.51 / 127, "fp8": 2**-4}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("attention"), ISA)


@pytest.fixture(scope="module")
def pools(library: Path) -> Iterator[dict[int, Kernels]]:
    pools = {count: Kernels(library, count) for count in THREADS}
    yield pools
    for pool in pools.values():
        pool.close()


@st.composite
def shapes(draw: st.DrawFn, kv_format: str = "float32", block_sizes: tuple[int, ...] = BLOCK_SIZES) -> Shape:
    num_kv_heads = draw(st.integers(1, 3))
    group = draw(st.sampled_from((1, 2, 3, 4, 7, 13)))
    head_dim = 2 * draw(st.one_of(st.integers(4, 40), st.sampled_from((32, 64, 128))))
    return Shape(num_kv_heads * group, num_kv_heads, head_dim, draw(st.sampled_from(block_sizes)), kv_format)


@st.composite
def contexts(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(rows, context) of each span: decodes, chunks, whole prompts."""
    spans = []
    for _ in range(draw(st.integers(1, 4))):
        context = draw(st.one_of(st.integers(1, 150), st.integers(500, 530), st.integers(1000, 1100)))
        rows = draw(st.one_of(st.just(1), st.integers(1, min(context, 70)), st.just(min(context, 140))))
        spans.append((rows, context))
    return spans


def random_rows(shape: Shape, count: int, seed: int) -> np.ndarray:
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def scattered_blocks(shape: Shape, lengths: list[int], seed: int) -> tuple[list[list[int]], int]:
    """A block table for each length, no two sharing a block, and the number of blocks."""
    counts = [-(-length // shape.block_size) for length in lengths]
    order = np.random.default_rng(seed).permutation(sum(counts) + 3).tolist()
    tables = []
    for count in counts:
        tables.append(order[:count])
        order = order[count:]
    return tables, sum(counts) + 3


def expected_attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int) -> np.ndarray:
    """[rows, heads, dim] queries in units of log2 against [context, KV heads, dim], in float64."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("rhd,khd->hrk", queries.astype(np.float64), keys) * np.log(2.0)
    hidden = np.arange(len(keys))[None, :] > np.arange(first, first + len(queries))[:, None]
    scores[:, hidden] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return np.einsum("hrk,khd->rhd", weights, values).reshape(len(queries), -1)


def stale_rows(shape: Shape, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows for every slot of a pool, as others have left them."""
    count = num_blocks * shape.block_size
    return random_rows(shape, count, 1), np.arange(count)


class Requests:
    """Some requests whose keys and values are written, all tokens at once; of each the last rows attend."""

    def __init__(self, kernels: Kernels, shape: Shape, spans: list[tuple[int, int]], seed: int) -> None:
        self.kernels, self.shape = kernels, shape
        tables, num_blocks = scattered_blocks(shape, [context for _, context in spans], seed)
        self.layer = kernels.new_layer(shape, num_blocks)
        self.spans: list[Span] = []
        self.slots, queries, row = [], [], 0
        for index, ((rows, context), blocks) in enumerate(zip(spans, tables, strict=True)):
            slots = slots_of(blocks, shape.block_size, 0, context)
            qkv = random_rows(shape, context, seed + index)
            written = kernels.write(shape, self.layer, qkv, slots, scale=1.5 * shape.head_dim**-0.5)
            self.slots.append(slots)
            self.spans.append(Span(row, rows, context, blocks))
            queries.append(written[context - rows :])
            row += rows
        self.queries = np.concatenate(queries)

    def attend(self) -> np.ndarray:
        return self.kernels.attend(self.shape, self.layer, self.queries, self.spans)

    def expected(self) -> np.ndarray:
        parts = []
        for span, slots in zip(self.spans, self.slots, strict=True):
            keys, values = self.kernels.read(self.shape, self.layer, slots)
            queries = self.queries[span.first_row : span.first_row + span.num_rows, :, : self.shape.head_dim]
            parts.append(expected_attention(queries, keys, values, span.context_len - span.num_rows))
        return np.concatenate(parts)


# -- what is computed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", FORMATS)
@EXAMPLES
@given(data=st.data(), seed=st.integers(0, 2**20), threads=st.sampled_from(THREADS))
def test_attention_is_float64_s(pools, kv_format, data, seed, threads):
    shape = data.draw(shapes(kv_format))
    requests = Requests(pools[threads], shape, data.draw(contexts()), seed)
    np.testing.assert_allclose(requests.attend(), requests.expected(), rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("kv_format", FORMATS)
@EXAMPLES
@given(data=st.data(), seed=st.integers(0, 2**20), rotated=st.booleans(), normed=st.booleans())
def test_what_is_written_is_the_rotated_rows(pools, kv_format, data, seed, rotated, normed):
    shape = data.draw(shapes(kv_format))
    count, half, dim = data.draw(st.integers(1, 50)), shape.head_dim // 2, shape.head_dim
    rng = np.random.default_rng(seed)
    qkv = random_rows(shape, count, seed) * np.exp(rng.standard_normal(1)).astype(np.float32)
    angles = rng.uniform(0, 7, (count, half)).astype(np.float32)
    rotation = (np.cos(angles), np.sin(angles)) if rotated else None
    norms = (rng.uniform(0.5, 2, (2, dim)).astype(np.float32)) if normed else None
    tables, num_blocks = scattered_blocks(shape, [count], seed)
    slots = slots_of(tables[0], shape.block_size, 0, count)
    layer = pools[2].new_layer(shape, num_blocks)
    queries = pools[2].write(
        shape, layer, qkv, slots, rotation=rotation, norms=tuple(norms) if normed else None, eps=1e-5, scale=0.3
    )

    heads = qkv.astype(np.float64).reshape(count, -1, dim)
    expected = np.split(heads, [shape.num_heads, shape.num_heads + shape.num_kv_heads], axis=1)
    for part in range(2):
        if normed:
            power = np.mean(expected[part] ** 2, axis=-1, keepdims=True)
            expected[part] = expected[part] / np.sqrt(power + 1e-5) * norms[part]
        if rotated:
            first, second = expected[part][..., :half], expected[part][..., half:]
            cos, sin = (x.astype(np.float64)[:, None, :] for x in rotation)
            expected[part] = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    np.testing.assert_allclose(queries[..., :dim], expected[0] * 0.3, rtol=1e-5, atol=1e-5)
    assert not queries[..., dim:].any()
    for stored, exact in zip(pools[2].read(shape, layer, slots), expected[1:], strict=True):
        tolerance = STORED_TOLERANCE[kv_format]
        size = np.abs(exact).max(axis=-1, keepdims=True) if kv_format == "int8" else np.abs(exact)
        floor = np.abs(exact).max(axis=-1, keepdims=True) * 2**-9 / 448 if kv_format == "fp8" else 0
        assert (np.abs(stored - exact) <= size * tolerance * 1.01 + floor + 2e-5).all()


@pytest.mark.parametrize("kv_format", ["float16", "bfloat16"])
def test_halves_round_to_nearest_even(pools, kv_format):
    import torch

    shape = Shape(1, 1, 64, 16, kv_format)
    rng = np.random.default_rng(7)
    rows = (rng.standard_normal((512, 192)) * np.exp2(rng.integers(-30, 16, (512, 192)))).astype(np.float32)
    layer = pools[1].new_layer(shape, 32)
    slots = np.arange(512)
    pools[1].write(shape, layer, rows, slots)
    stored = pools[1].read(shape, layer, slots)
    limit = torch.finfo(getattr(torch, kv_format)).max
    exact = torch.from_numpy(rows).clamp(-limit, limit).to(getattr(torch, kv_format)).double().numpy()
    np.testing.assert_array_equal(np.concatenate(stored, axis=-1)[:, 0], exact[:, 64:])


def test_fp8_rounds_to_nearest_even(pools):
    import torch

    shape = Shape(1, 1, 256, 16, "fp8")
    rows = (np.random.default_rng(7).standard_normal((16, 768)) * np.exp2(-np.arange(768) % 20)).astype(np.float32)
    rows[:, 300] = rows[:, 600] = 448.0  # so that the scale is 1
    rows = np.clip(rows, -448, 448)
    layer = pools[1].new_layer(shape, 1)
    pools[1].write(shape, layer, rows, np.arange(16))
    stored = np.concatenate(pools[1].read(shape, layer, np.arange(16)), axis=-1)[:, 0]
    exact = torch.from_numpy(rows[:, 256:]).to(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(stored, exact)


def test_nothing_to_do(pools):
    shape = Shape(4, 2, 16, 16)
    layer = pools[2].new_layer(shape, 1)
    queries = pools[2].write(shape, layer, random_rows(shape, 0, 0), np.zeros(0, dtype=np.int64))
    assert pools[2].attend(shape, layer, queries, []).size == 0
    assert not layer.any()


# -- to the bit --------------------------------------------------------------------------------------------------------


def alone_in_one_piece(kernels: Kernels, shape: Shape, qkv: np.ndarray) -> np.ndarray:
    blocks = list(range(-(-len(qkv) // shape.block_size)))
    layer = kernels.new_layer(shape, len(blocks))
    slots = slots_of(blocks, shape.block_size, 0, len(qkv))
    queries = kernels.write(shape, layer, qkv, slots, scale=0.2)
    return kernels.attend(shape, layer, queries, [Span(0, len(qkv), len(qkv), blocks)])


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[int]:
    """Where chunks of a request end."""
    sizes = st.one_of(st.just(1), st.integers(1, 40), st.integers(30, 300))
    ends, end = [], 0
    while end < length:
        end = min(length, end + draw(sizes) if len(ends) < 12 else length)
        ends.append(end)
    return ends


@pytest.mark.parametrize("kv_format", FORMATS)
@EXAMPLES
@given(data=st.data(), seed=st.integers(0, 2**20), threads=st.sampled_from(THREADS))
def test_a_row_is_the_same_however_it_is_computed(pools, kv_format, data, seed, threads):
    whole = data.draw(shapes(kv_format, (16,)))
    shape = Shape(
        whole.num_heads, whole.num_kv_heads, whole.head_dim, data.draw(st.sampled_from(BLOCK_SIZES)), kv_format
    )
    length = data.draw(st.one_of(st.integers(1, 200), st.integers(500, 700), st.integers(1020, 1100)))
    qkv = random_rows(shape, length, seed)
    expected = alone_in_one_piece(pools[1], whole, qkv)

    kernels = pools[threads]
    companions = data.draw(contexts())
    lengths = [length, *(context for _, context in companions)]
    tables, num_blocks = scattered_blocks(shape, lengths, seed)
    layer = kernels.new_layer(shape, num_blocks)
    kernels.write(shape, layer, *stale_rows(shape, num_blocks))
    start = 0
    for end in data.draw(cuts(length)):
        queries = kernels.write(
            shape, layer, qkv[start:end], slots_of(tables[0], shape.block_size, start, end), scale=0.2
        )
        spans, parts, row = [Span(0, end - start, end, tables[0])], [queries], end - start
        for (rows, context), blocks in zip(companions, tables[1:], strict=True):
            spans.append(Span(row, rows, context, blocks))
            parts.append(np.ones((rows, *queries.shape[1:]), dtype=np.float32))
            row += rows
        out = kernels.attend(shape, layer, np.concatenate(parts), spans)
        np.testing.assert_array_equal(out[: end - start].view(np.int32), expected[start:end].view(np.int32))
        start = end


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("block_size", [16, 5])
def test_poison_stays_in_its_request(pools, kv_format, block_size):
    """A request of NaN and infinities leaves its companions as they were, and whoever gets its blocks later."""
    shape = Shape(6, 2, 24, block_size, kv_format)
    clean = random_rows(shape, 90, 1)
    expected = alone_in_one_piece(pools[1], shape, clean)
    poison = random_rows(shape, 100, 2)
    poison[::3] = np.nan
    poison[1::3] = np.inf
    poison[::5, ::2] = -np.inf
    tables, num_blocks = scattered_blocks(shape, [90, 100], 3)
    layer = pools[2].new_layer(shape, num_blocks)
    poisoned = pools[2].write(shape, layer, poison, slots_of(tables[1], block_size, 0, 100))
    # the clean request lives in blocks that the poisoned one has used
    other = pools[2].new_layer(shape, num_blocks)
    for blocks, memory in ((tables[0], layer), (tables[1], other)):
        if memory is other:
            pools[2].write(shape, other, poison, slots_of(tables[1], block_size, 0, 100))
        queries = pools[2].write(shape, memory, clean, slots_of(blocks, block_size, 0, 90), scale=0.2)
        spans = [Span(0, 90, 90, blocks), Span(90, 100, 100, tables[1])]
        out = pools[2].attend(shape, memory, np.concatenate([queries, poisoned]), spans)
        np.testing.assert_array_equal(out[:90].view(np.int32), expected.view(np.int32))


def test_a_long_context(pools):
    shape = Shape(2, 1, 16, 16)
    requests = Requests(pools[5], shape, [(3, 131_072), (1, 70_001)], 5)
    np.testing.assert_allclose(requests.attend(), requests.expected(), rtol=1e-4, atol=2e-6)


# -- other builds ------------------------------------------------------------------------------------------------------

OTHER_BUILDS = pytest.mark.skipif("ATTENTION_BUILDS" not in os.environ, reason="takes minutes: set ATTENTION_BUILDS=1")
ADDRESS, THREAD = SANITIZE, ["-fsanitize=thread", "-O1", "-g"]
ARM = "aarch64-linux-gnu-g++"


def run_program(
    folder: Path, isa: str, flags: list[str], compiler: str = "g++", emulator: tuple[str, ...] = ()
) -> None:
    """The C++ program that compares many sizes by itself."""
    program = folder / "attention-sizes"
    command = [compiler, *BASE_FLAGS, f"-DHS_ISA={isa}", *FLAGS[isa], f"-I{NATIVE}/src", *flags]
    sources = [f"{NATIVE}/tests/attention_sizes.cpp", f"{NATIVE}/src/threads.cpp"]
    subprocess.run([*command, *sources, "-o", str(program)], check=True)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert int(done.stdout.split()[0]) > 1000


@pytest.mark.timeout(900)
def test_many_sizes_stay_inside_their_memory(tmp_path):
    run_program(tmp_path, best_isa(), ADDRESS)


@OTHER_BUILDS
@pytest.mark.timeout(900)
@pytest.mark.parametrize("isa", sorted({"portable", best_isa()}))
def test_many_sizes_without_races(tmp_path, isa):
    run_program(tmp_path, isa, THREAD)


@OTHER_BUILDS
@pytest.mark.timeout(900)
def test_many_sizes_stay_inside_their_memory_portable(tmp_path):
    run_program(tmp_path, "portable", ADDRESS)


@OTHER_BUILDS
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which(ARM) is None or shutil.which("qemu-aarch64") is None, reason="no emulator")
def test_many_sizes_on_neon(tmp_path):
    run_program(tmp_path, "neon", ["-O2", "-static"], ARM, ("qemu-aarch64",))


@OTHER_BUILDS
@pytest.mark.timeout(900)
def test_portable_kernels():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=900", __file__]
    environment = {name: value for name, value in os.environ.items() if name != "ATTENTION_BUILDS"}
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=environment | {"ATTENTION_ISA": "portable"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
