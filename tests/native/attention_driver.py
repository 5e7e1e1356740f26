"""Builds the attention kernels alone, for one instruction set, and calls them: shared by tests and benchmark."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

NATIVE = Path(__file__).parents[2] / "native"
FORMATS = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "fp8": 4}
TORCH_TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c"]
FLAGS = {
    "portable": [],
    "avx2": ["-DHS_AVX2", "-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-DHS_AVX512", *AVX512],
    "amx": ["-DHS_AMX", *AVX512, "-mamx-tile", "-mamx-int8"],
    "neon": ["-DHS_NEON", "-march=armv8.2-a+dotprod"],
}
BASE_FLAGS = ["-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-Wall", "-Wextra", "-Wno-psabi"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"]


def build(folder: Path, isa: str) -> Path:
    library = folder / f"attention-{isa}.so"
    command = ["g++", *BASE_FLAGS, "-O3", "-fPIC", "-shared", f"-DHS_ISA={isa}", *FLAGS[isa], f"-I{NATIVE}/src"]
    sources = [f"{NATIVE}/tests/attention_driver.cpp", f"{NATIVE}/src/threads.cpp"]
    subprocess.run([*command, *sources, "-o", str(library)], check=True)
    return library


def best_isa() -> str:
    """The best set that this machine runs."""
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.exists() else set()
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"} <= flags:
        return "avx512"
    if {"avx2", "fma", "f16c"} <= flags:
        return "avx2"
    return "neon" if "asimddp" in flags else "portable"


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_format: str = "float32"

    @property
    def padded_dim(self) -> int:
        return (self.head_dim + 15) // 16 * 16

    def as_ints(self) -> ctypes.Array[ctypes.c_int]:
        return (ctypes.c_int * 4)(FORMATS[self.kv_format], self.num_kv_heads, self.head_dim, self.block_size)


@dataclass(frozen=True)
class Span:
    first_row: int
    num_rows: int
    context_len: int
    blocks: list[int]


def address(array: np.ndarray | None) -> ctypes.c_void_p:
    if array is None:
        return ctypes.c_void_p(None)
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def slots_of(blocks: list[int], block_size: int, start: int, end: int) -> np.ndarray:
    positions = np.arange(start, end)
    return np.asarray(blocks, dtype=np.int64)[positions // block_size] * block_size + positions % block_size


class Kernels:
    """One build of the kernels, with a pool of threads."""

    def __init__(self, library: Path, num_threads: int) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.pool_create.restype = ctypes.c_void_p
        self._pool = ctypes.c_void_p(self._library.pool_create(num_threads))

    def close(self) -> None:
        self._library.pool_destroy(self._pool)

    def sizes(self, shape: Shape) -> tuple[int, int, int, int]:
        """Bytes of a block and of a head of it, and where the values and the scales of a head begin."""
        sizes = [ctypes.c_size_t() for _ in range(4)]
        self._library.kv_sizes(shape.as_ints(), *(ctypes.byref(size) for size in sizes))
        block, head, values, scales = (size.value for size in sizes)
        return block, head, values, scales

    def new_layer(self, shape: Shape, num_blocks: int) -> np.ndarray:
        """Zero bytes, on a cache line's boundary."""
        size = self.sizes(shape)[0] * num_blocks
        memory = np.zeros(size + 64, dtype=np.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : start + size]

    def write(
        self,
        shape: Shape,
        layer: np.ndarray,
        qkv: np.ndarray,
        slots: np.ndarray,
        *,
        rotation: tuple[np.ndarray, np.ndarray] | None = None,
        norms: tuple[np.ndarray, np.ndarray] | None = None,
        eps: float = 1e-6,
        scale: float = 1.0,
    ) -> np.ndarray:
        queries = np.full((len(qkv), shape.num_heads, shape.padded_dim), np.nan, dtype=np.float32)
        cos, sin = rotation or (None, None)
        norm_q, norm_k = norms or (None, None)
        self._library.rotate_and_write(
            self._pool, shape.as_ints(), address(layer), address(qkv), ctypes.c_size_t(qkv.shape[1]), len(qkv),
            shape.num_heads, address(norm_q), address(norm_k), ctypes.c_float(eps), address(cos), address(sin),
            address(slots), ctypes.c_float(scale), address(queries),
        )  # fmt: skip
        return queries

    def attend(self, shape: Shape, layer: np.ndarray, queries: np.ndarray, spans: list[Span]) -> np.ndarray:
        width = shape.num_heads * shape.head_dim
        out = np.full((len(queries), width + 3), np.nan, dtype=np.float32)  # rows further apart than wide
        longest = max((len(span.blocks) for span in spans), default=0)
        tables = np.full((len(spans), longest), -(1 << 40), dtype=np.int64)
        for table, span in zip(tables, spans, strict=True):
            table[: len(span.blocks)] = span.blocks
        numbers = np.asarray([(s.first_row, s.num_rows, s.context_len) for s in spans], dtype=np.int32)
        self._library.attend(
            self._pool, shape.as_ints(), address(layer), address(queries), shape.num_heads, len(spans),
            address(numbers), address(tables), ctypes.c_size_t(longest), address(out), ctypes.c_size_t(width + 3),
        )  # fmt: skip
        assert np.isnan(out[:, width:]).all(), "wrote beyond a row"
        return out[:, :width]

    def read(self, shape: Shape, layer: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values [tokens, KV heads, head_dim] in float64, as this module understands the layout."""
        block_bytes, head_bytes, values_at, scales_at = self.sizes(shape)
        kind, size, dim = TORCH_TYPES[shape.kv_format], shape.block_size, shape.head_dim
        heads = torch.from_numpy(layer).view(-1, shape.num_kv_heads, head_bytes)
        assert block_bytes == shape.num_kv_heads * head_bytes

        def part(start: int, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
            end = start + rows * columns * dtype.itemsize
            return heads[..., start:end].contiguous().view(dtype).view(*heads.shape[:2], rows, columns).double()

        keys = part(0, kind, dim, size).transpose(2, 3)
        values = part(values_at, kind, size, shape.padded_dim)
        if shape.kv_format in ("int8", "fp8"):
            scales = part(scales_at, torch.float32, 2, size)
            keys, values = keys * scales[:, :, 0, :, None], values * scales[:, :, 1, :, None]
        assert not values[..., dim:].any(), "padding must stay zero"
        block, offset = torch.from_numpy(slots // size), torch.from_numpy(slots % size)
        return keys[block, :, offset].numpy(), values[block, :, offset, :dim].numpy()
