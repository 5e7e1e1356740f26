"""What one step asks of the model: which rows belong to which request, and where their keys and values live.

Owns the layout's types and nothing else. Made by the worker, read by the model; knows no request ids and no scheduler.
Letters: T rows (tokens) of the step, S block size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """The rows of one request: its tokens `[context_len - num_rows, context_len)`.

    The keys and values of token `i` live in slot `block_table[i // S] * S + i % S`.
    """

    first_row: int
    num_rows: int
    context_len: int  # tokens, the chunk included
    block_table: Tensor  # [ceil(context_len / S)] int64, on the pool's device


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """All rows of a step. Spans are in row order, without gaps, and cover every row; no two share a written slot."""

    positions: Tensor  # [T] int64, place of each token in its request
    slot_mapping: Tensor  # [T] int64, block_id * S + offset
    spans: tuple[ChunkSpan, ...]
