"""Speed of attention alone: GFLOP/s of prefills, GB/s of decodes; the best of several runs.

PYTHONPATH=. python native/tests/bench_attention.py [--isa avx2] [--threads 2] [--kv float32] [--block-size 16]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.native.attention_driver import FORMATS, Kernels, Shape, Span, best_isa, build, slots_of


def seconds(kernels: Kernels, shape: Shape, spans: list[tuple[int, int]], repeats: int) -> tuple[float, float]:
    """Of the write of all contexts, and of one attend."""
    counts = [-(-context // shape.block_size) for _, context in spans]
    order = np.random.default_rng(0).permutation(sum(counts)).tolist()
    layer = kernels.new_layer(shape, sum(counts))
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    listed, queries, row, writing = [], [], 0, 0.0
    for (rows, context), count in zip(spans, counts, strict=True):
        blocks, order = order[:count], order[count:]
        qkv = np.random.default_rng(1).standard_normal((context, width), dtype=np.float32)
        angles = np.random.default_rng(2).uniform(0, 7, (context, shape.head_dim // 2)).astype(np.float32)
        slots = slots_of(blocks, shape.block_size, 0, context)
        start = time.perf_counter()
        written = kernels.write(shape, layer, qkv, slots, rotation=(np.cos(angles), np.sin(angles)), scale=0.2)
        writing += time.perf_counter() - start
        queries.append(written[context - rows :])
        listed.append(Span(row, rows, context, blocks))
        row += rows
    together = np.concatenate(queries)
    attending = []
    for _ in range(repeats):
        start = time.perf_counter()
        kernels.attend(shape, layer, together, listed)
        attending.append(time.perf_counter() - start)
    return writing, min(attending)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", default=best_isa())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv", choices=FORMATS, default="float32")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--shape", default="9,3,64", help="heads, KV heads, head_dim")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    heads, kv_heads, dim = map(int, options.shape.split(","))
    shape = Shape(heads, kv_heads, dim, options.block_size, options.kv)
    with tempfile.TemporaryDirectory() as folder:
        kernels = Kernels(build(Path(folder), options.isa), options.threads)
    for length in (512, 2048, 4096):
        writing, best = seconds(kernels, shape, [(length, length)], options.repeats)
        flops = 4 * dim * heads * length * (length + 1) / 2
        print(
            f"prefill {length:5}: {best * 1e3:8.2f} ms {flops / best / 1e9:7.1f} GFLOP/s; write {writing * 1e3:.2f} ms"
        )
    for batch, context in ((1, 512), (1, 2048), (1, 8192), (4, 2048), (16, 1024), (16, 8192), (64, 2048)):
        _, best = seconds(kernels, shape, [(1, context)] * batch, options.repeats * 2)
        size = batch * context * kernels.sizes(shape)[0] / shape.block_size
        print(
            f"decode {batch:3} x {context:5}: {best * 1e6:8.0f} us {size / best / 1e9:7.1f} GB/s of {size / 1e6:.1f} MB"
        )
    kernels.close()


if __name__ == "__main__":
    main()
