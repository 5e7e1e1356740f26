"""Attention alone as cases: a chunk of a prompt, one row of a decode; keys and values that no cache holds."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from headstart.bench.kernel_report import Work, attended_pairs
from headstart.kernel_bench.linear import OperationCase
from headstart.kv import KVPool
from headstart.ops import BatchLayout, ChunkSpan, HeadShape, KVFormat, Ops
from headstart.perf.model_spec import ModelSpec

CONTEXTS = (512, 4096)
CHUNK = 512  # rows of a prefill: the last of its context
_BLOCK_SIZE = 16
_FORMAT = KVFormat.FLOAT16  # what the server takes beside quantized weights
_MOST_LAYERS = 256


def attention_cases(ops: Ops, spec: ModelSpec, cold_bytes: int) -> list[OperationCase]:
    """Those contexts that the model has."""
    contexts = [context for context in CONTEXTS if context <= spec.max_position_embeddings]
    return [
        _case(ops, spec, name, rows, context, cold_bytes)
        for name, rows in (("attention, prefill", CHUNK), ("attention, decode", 1))
        for context in contexts
    ]


def _case(ops: Ops, spec: ModelSpec, name: str, rows: int, context: int, cold_bytes: int) -> OperationCase:
    heads = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    layout = ops.kv_layout(heads, _BLOCK_SIZE, _FORMAT)
    num_blocks = -(-context // _BLOCK_SIZE)
    num_layers = min(_MOST_LAYERS, -(-cold_bytes // (num_blocks * layout.block_bytes)))
    pool = KVPool(layout, num_layers, num_blocks, "cpu")
    pool.data.view(_FORMAT.dtype).normal_(generator=torch.Generator().manual_seed(context))
    positions = torch.arange(context - rows, context)
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
    slots = table[positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
    batch = BatchLayout(positions, slots, (ChunkSpan(0, rows, context, table),))
    cos, sin = torch.ones(rows, spec.head_dim // 2), torch.zeros(rows, spec.head_dim // 2)
    step = ops.attention_step(batch, heads, layout, cos, sin)
    width = heads.rotated_size + spec.num_kv_heads * spec.head_dim
    queries = step.rotate_and_write(torch.randn(rows, width), pool.layers[0], rotate=True, qk_norm=None)
    upcoming = itertools.cycle(pool.layers)

    def run() -> Tensor:
        return step.attend(queries, next(upcoming))

    # Scores, then the weighted sum of the values: a multiplication and an addition a dimension each.
    operations = 4.0 * spec.head_dim * spec.num_heads * attended_pairs(rows, context)
    num_bytes = 2.0 * context * spec.num_kv_heads * spec.head_dim * _FORMAT.dtype.itemsize
    return OperationCase(name, rows, str(_FORMAT), [Work("float32", operations)], num_bytes, run, context)
