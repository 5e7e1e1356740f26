"""Rotary embedding, KV write and paged attention of one step for float32 on CPU, bit-equal however a step is composed.

Owns the step's plan (made once, used by every layer): which rows go through torch's flash attention together, over
which slots, under which mask. Rows and contexts are padded to the shapes that `flash_shapes` found safe; padding keys
are other slots of the pool, masked out. They must be finite, so what is written is made finite.

A context whose blocks follow each other is read in place; any other is gathered, block by block, into a scratch buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headstart.ops.base import HeadShape, PoolShape
from headstart.ops.batch import BatchLayout, ChunkSpan
from headstart.ops.flash_shapes import KEY_TILE, FlashShapes, flash_attention

_MIN_RUN = 8  # rows from which writing a run of slots as one slice beats scattering them


@dataclass(frozen=True, slots=True)
class _Piece:
    """Query rows that go through the kernel together. `queries` and `out` are views of the step's buffers."""

    queries: Tensor  # [b, h, padded rows, D]
    out: Tensor  # [b, h, rows, D]
    num_keys: int  # padded
    mask: Tensor | None  # [.., padded rows, num_keys]


@dataclass(frozen=True, slots=True)
class _Context:
    """One request's keys: in place from `first_slot` on, or gathered from `block_ids`. `pieces` see its beginning."""

    num_keys: int  # of the longest piece
    first_slot: int
    block_ids: Tensor | None
    grouped: bool  # query heads of a group are the rows of one tile (decode), else each is a head of its own
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows whose slots follow each other."""

    rows: slice
    slots: slice


class CpuAttentionStep:
    """`AttentionStep` for float32 on CPU."""

    __slots__ = (
        "_contexts", "_cos", "_heads", "_out", "_pool", "_rotated", "_runs", "_scatter_rows", "_scatter_slots",
        "_scratch", "_shapes", "_sin",
    )  # fmt: skip

    def __init__(
        self, layout: BatchLayout, heads: HeadShape, pool: PoolShape, cos: Tensor, sin: Tensor, shapes: FlashShapes
    ) -> None:
        num_rows = layout.positions.shape[0]
        self._heads, self._pool, self._shapes = heads, pool, shapes
        self._cos = torch.cat((cos, cos), -1).unsqueeze(1)  # [T, 1, D]
        self._sin = sin.unsqueeze(1)  # [T, 1, D / 2]
        # Tiles may reach past the last row: the buffer is longer, and zero there.
        padding = shapes.row_multiple
        self._rotated = torch.zeros(num_rows + padding, heads.num_heads + heads.num_kv_heads, heads.head_dim)
        self._out = torch.empty(num_rows, heads.num_heads, heads.head_dim)
        self._plan_writes(layout)
        self._contexts = tuple(self._context(span) for span in layout.spans)
        gathered = max((c.block_ids.shape[0] for c in self._contexts if c.block_ids is not None), default=0)
        block_elements = heads.num_kv_heads * pool.block_size * heads.head_dim
        self._scratch = torch.empty(2, gathered * block_elements, dtype=pool.dtype)

    # -- planning: once a step ----------------------------------------------------------------------------------------

    def _plan_writes(self, layout: BatchLayout) -> None:
        slots = layout.slot_mapping.numpy()
        runs, scattered = [], []
        for span in layout.spans:
            first, last = span.first_row, span.first_row + span.num_rows
            if span.num_rows >= _MIN_RUN and _consecutive(slots[first:last]):
                runs.append(_Run(slice(first, last), slice(int(slots[first]), int(slots[first]) + span.num_rows)))
            else:
                scattered.append(torch.arange(first, last))
        self._runs = tuple(runs)
        self._scatter_rows = torch.cat(scattered) if scattered and runs else None
        self._scatter_slots = None
        if scattered:
            self._scatter_slots = layout.slot_mapping if not runs else layout.slot_mapping[self._scatter_rows]

    def _context(self, span: ChunkSpan) -> _Context:
        block_size = self._pool.block_size
        pieces = self._decode_piece(span) if span.num_rows == 1 else self._row_pieces(span)
        num_keys = pieces[-1].num_keys
        blocks = span.block_table.numpy()
        first_slot = int(blocks[0]) * block_size
        if first_slot + num_keys <= self._pool.num_slots and _consecutive(blocks):
            return _Context(num_keys, first_slot, None, span.num_rows == 1, pieces)
        num_blocks = -(-num_keys // block_size)
        block_ids = span.block_table.new_full((num_blocks,), int(blocks[0]))  # padding: any block that exists
        block_ids[: blocks.shape[0]] = span.block_table
        return _Context(num_keys, 0, block_ids, span.num_rows == 1, pieces)

    def _decode_piece(self, span: ChunkSpan) -> tuple[_Piece, ...]:
        """One row. The query heads that share a KV head are the rows of one tile; padding rows are whatever follows."""
        heads, size = self._heads, self._heads.head_dim
        rows = self._shapes.padded_rows(heads.group_size)
        num_keys = self._shapes.padded(span.context_len)
        queries = self._rotated.as_strided(
            (1, heads.num_kv_heads, rows, size),
            (0, heads.group_size * size, size, 1),
            span.first_row * self._rotated.stride(0),
        )
        out = self._out[span.first_row].view(1, heads.num_kv_heads, heads.group_size, size)
        mask = None
        if num_keys > span.context_len:
            mask = torch.zeros(num_keys)
            mask[span.context_len :] = -torch.inf
            mask = mask.expand(1, 1, rows, num_keys)
        return (_Piece(queries, out, num_keys, mask),)

    def _row_pieces(self, span: ChunkSpan) -> tuple[_Piece, ...]:
        """Many rows, cut where a piece's rows need not look at the keys of the next."""
        heads, size = self._heads, self._heads.head_dim
        start = span.context_len - span.num_rows
        pieces = []
        for first, last in _cut(start, span.context_len, self._shapes.cuts):
            rows = self._shapes.padded_rows(last - first)
            num_keys = self._shapes.padded(last)
            first_row = span.first_row + first - start
            queries = self._rotated.as_strided(
                (heads.num_kv_heads, heads.group_size, rows, size),
                (heads.group_size * size, size, self._rotated.stride(0), 1),
                first_row * self._rotated.stride(0),
            )
            out = self._out[first_row : first_row + last - first].permute(1, 0, 2)
            out = out.unflatten(0, (heads.num_kv_heads, heads.group_size))
            mask = torch.full((rows, num_keys), -torch.inf).triu_(first + 1)
            pieces.append(_Piece(queries, out, num_keys, mask.view(1, 1, rows, num_keys)))
        return tuple(pieces)

    # -- one layer ----------------------------------------------------------------------------------------------------

    def rotate_and_write(self, qkv: Tensor, keys: Tensor, values: Tensor, *, rotate: bool) -> Tensor:
        heads = self._heads
        x = qkv[:, : heads.rotated_size].view(-1, heads.num_heads + heads.num_kv_heads, heads.head_dim)
        rotated = self._rotated[: x.shape[0]]
        if rotate:
            half = heads.head_dim // 2
            torch.mul(x, self._cos, out=rotated)
            rotated[..., :half].addcmul_(x[..., half:], self._sin, value=-1)
            rotated[..., half:].addcmul_(x[..., :half], self._sin)
        else:
            rotated.copy_(x)
        self._write(rotated[:, heads.num_heads :], keys)
        self._write(qkv[:, heads.rotated_size :].view(-1, heads.num_kv_heads, heads.head_dim), values)
        return rotated[:, : heads.num_heads]

    def _write(self, new: Tensor, cache: Tensor) -> None:
        """new: `[T, K, D]`. Infinities and NaN would reach other requests through masked padding: none are stored."""
        by_head = new.transpose(0, 1)
        for run in self._runs:
            target = cache[:, run.slots]
            if cache.dtype == new.dtype:
                torch.nan_to_num(by_head[:, run.rows], out=target)
            else:
                target.copy_(_finite(by_head[:, run.rows], cache.dtype))
        if self._scatter_slots is not None:
            rows = by_head if self._scatter_rows is None else by_head[:, self._scatter_rows]
            cache.index_copy_(1, self._scatter_slots, _finite(rows, cache.dtype))

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """`queries` is what `rotate_and_write` returned; it lies in a buffer of which the pieces are views."""
        assert queries.data_ptr() == self._rotated.data_ptr(), "attend takes what rotate_and_write returned"
        scale = self._heads.scale
        for context in self._contexts:
            k, v, first = self._keys_and_values(context, keys, values)
            for piece in context.pieces:
                attended = flash_attention(
                    piece.queries,
                    self._by_query_head(k, piece.num_keys, first, context.grouped),
                    self._by_query_head(v, piece.num_keys, first, context.grouped),
                    piece.mask,
                    scale,
                )
                num_rows = piece.out.shape[2]
                piece.out.copy_(attended if attended.shape[2] == num_rows else attended[:, :, :num_rows])
        return self._out.flatten(1)

    def _keys_and_values(self, context: _Context, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, int]:
        """Dense float32 `[K, slots, D]` and the slot at which the context begins."""
        if context.block_ids is not None:
            keys, values = self._gathered(context.block_ids, keys, 0), self._gathered(context.block_ids, values, 1)
        if keys.dtype == torch.float32:
            return keys, values, context.first_slot
        slots = slice(context.first_slot, context.first_slot + context.num_keys)
        return keys[:, slots].float().contiguous(), values[:, slots].float().contiguous(), 0

    def _gathered(self, block_ids: Tensor, cache: Tensor, half: int) -> Tensor:
        num_kv_heads, _, size = cache.shape
        row = self._pool.block_size * size
        count = block_ids.shape[0]
        out = self._scratch[half, : num_kv_heads * count * row].view(num_kv_heads, count, row)
        torch.index_select(cache.view(num_kv_heads, self._pool.num_blocks, row), 1, block_ids, out=out)
        return out.view(num_kv_heads, count * self._pool.block_size, size)

    def _by_query_head(self, dense: Tensor, num_keys: int, first: int, grouped: bool) -> Tensor:
        """`[1, K, num_keys, D]` for grouped rows, else `[K, H / K, num_keys, D]` with stride 0 over a group."""
        num_kv_heads, slots, size = dense.shape
        offset = dense.storage_offset() + first * size
        if grouped:
            return dense.as_strided((1, num_kv_heads, num_keys, size), (0, slots * size, size, 1), offset)
        return dense.as_strided(
            (num_kv_heads, self._heads.group_size, num_keys, size), (slots * size, 0, size, 1), offset
        )


def _finite(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, what does not fit saturated, NaN as 0."""
    limits = torch.finfo(dtype)
    return x.nan_to_num(0.0).clamp_(limits.min, limits.max).to(dtype)


def _consecutive(ids: np.ndarray) -> bool:
    return bool(ids[-1] - ids[0] == len(ids) - 1 and (ids[1:] - ids[:-1] == 1).all())


def _cut(start: int, stop: int, cuts: tuple[int, ...]) -> list[tuple[int, int]]:
    """`[start, stop)` cut at every position `tile * KEY_TILE + cut`."""
    pieces = []
    while start < stop:
        tile = start // KEY_TILE * KEY_TILE
        end = min(stop, next(tile + cut for cut in cuts if tile + cut > start))
        pieces.append((start, end))
        start = end
    return pieces
