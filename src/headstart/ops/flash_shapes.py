"""Which shapes of CPU flash attention give every query row the same bits, whatever surrounds it. Found by trial, once.

Torch's kernel multiplies tiles of query rows with up to 512 keys at a time. Its matrix library chooses an order of
summation by the tile's shape: very few rows, or some numbers of keys, are summed differently in the last bits. So
query rows are padded to a multiple of `row_multiple`, and contexts to a length from `padded`, both of which agree with
a full tile. Padding is masked out and adds exact zeros. What was found on an AVX2 machine: 4 rows; all multiples of 16
keys but 208 to 368.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KEY_TILE = 512  # keys that the kernel multiplies at a time
_KEY_STEP = 16
_ROW_MULTIPLES = (4, 8, 16, 32)
_ROWS_TRIED = (4, 8, 12, 16, 32, 40, 64, 192, 200)

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def flash_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of q `[b, h, rows, D]` over k, v `[b, h, context, D]`; strides may be 0. mask is added."""
    return _flash(queries, keys, values, 0.0, False, attn_mask=mask, scale=scale)[0]


@dataclass(frozen=True, slots=True)
class FlashShapes:
    """Safe shapes of one head size on this machine.

    `cuts`: numbers of keys within a tile after which it pays to begin a new piece of query rows, which need not look
    further than their own piece.
    """

    row_multiple: int
    safe_keys: tuple[int, ...]  # sorted, the last is KEY_TILE
    cuts: tuple[int, ...]

    def padded(self, context_len: int) -> int:
        """The smallest safe context length that is no smaller."""
        whole = (context_len - 1) // KEY_TILE * KEY_TILE
        return whole + next(keys for keys in self.safe_keys if keys >= context_len - whole)

    def padded_rows(self, num_rows: int) -> int:
        return -(-num_rows // self.row_multiple) * self.row_multiple


def find_flash_shapes(head_dim: int) -> FlashShapes:
    """Try shapes against full tiles and keep those whose bits agree. Takes some ten milliseconds."""
    generator = torch.Generator().manual_seed(head_dim)
    rows = max(_ROWS_TRIED)
    q, k, v = (torch.randn(1, 1, n, head_dim, generator=generator) for n in (rows, KEY_TILE, KEY_TILE))

    def agrees(num_rows: int, num_keys: int, expected: Tensor) -> bool:
        tried = flash_attention(q[:, :, :num_rows], k[:, :, :num_keys], v[:, :, :num_keys], None, head_dim**-0.5)
        return torch.equal(tried, expected[:, :, :num_rows])

    full = flash_attention(q, k, v, None, head_dim**-0.5)
    row_multiple = next(
        (
            multiple
            for multiple in _ROW_MULTIPLES
            if all(agrees(num_rows, KEY_TILE, full) for num_rows in _ROWS_TRIED if num_rows % multiple == 0)
        ),
        _ROW_MULTIPLES[-1],
    )
    tried_rows = [num_rows for num_rows in _ROWS_TRIED if num_rows % row_multiple == 0]
    safe = []
    for num_keys in range(_KEY_STEP, KEY_TILE, _KEY_STEP):
        mask = torch.zeros(1, KEY_TILE)
        mask[:, num_keys:] = -torch.inf
        expected = flash_attention(q, k, v, mask.expand(rows, -1), head_dim**-0.5)
        if all(agrees(num_rows, num_keys, expected) for num_rows in tried_rows):
            safe.append(num_keys)
    safe.append(KEY_TILE)
    return FlashShapes(row_multiple, tuple(safe), _cuts(safe))


def _cuts(safe: list[int]) -> tuple[int, ...]:
    """Pieces of about 192 rows: large tiles, little masked work."""
    cuts: list[int] = []
    for keys in safe:
        if keys - (cuts[-1] if cuts else 0) >= 128 and (keys % 192 == 0 or keys == KEY_TILE):
            cuts.append(keys)
    return tuple(cuts)
