"""How weights are held: the formats, and a matrix in one of them before any machine has packed it.

Owns the canonical form that loaders and quantizers make and `Ops` implementations take. Must not know how a machine
computes with it. Letters: N outputs (rows), K inputs (columns), G groups of 32 columns.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZE = 32


class WeightFormat(enum.StrEnum):
    """The names are GGUF's where the numbers are."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"  # e4m3fn codes, one float32 scale a row
    Q8_0 = "q8_0"  # value = code * scale, code int8, one float16 scale a group
    Q4_0 = "q4_0"  # value = (code - 8) * scale, code 0..15
    Q4_1 = "q4_1"  # value = code * scale + minimum

    @property
    def grouped(self) -> bool:
        return self in _GROUPED


_GROUPED = frozenset({WeightFormat.Q8_0, WeightFormat.Q4_0, WeightFormat.Q4_1})


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix `[N, K]` in codes. K is padded with zero codes to whole groups where the format is grouped.

    `codes`: Q8_0 int8 `[N, G * 32]`; Q4_0 and Q4_1 uint8 `[N, G * 16]`, in each group of 16 bytes byte j holds column j
    in its low half and column j + 16 in its high half, as GGUF does; FP8 `torch.float8_e4m3fn` `[N, K]`.
    `scales`: float16 `[N, G]`; FP8 float32 `[N, 1]`. `minimums`: float16 `[N, G]` for Q4_1, else None.
    """

    format: WeightFormat
    shape: tuple[int, int]
    codes: Tensor
    scales: Tensor
    minimums: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scales, self.minimums) if part is not None)

    def rows(self, order: Tensor) -> QuantizedWeight:
        """The rows in another order (or some of them); nothing is rounded again."""
        minimums = None if self.minimums is None else self.minimums.index_select(0, order)
        shape = (int(order.shape[0]), self.shape[1])
        octets = self.codes.view(torch.uint8)  # not every operation takes float8
        codes = octets.index_select(0, order).view(self.codes.dtype)
        return QuantizedWeight(self.format, shape, codes, self.scales.index_select(0, order), minimums)

    def dequantize(self) -> Tensor:
        """float32 `[N, K]`: what the codes mean, each value rounded once."""
        num_rows, num_columns = self.shape
        if self.format is WeightFormat.FP8:
            return self.codes.float() * self.scales
        if self.format is WeightFormat.Q8_0:
            codes = self.codes.view(num_rows, -1, GROUP_SIZE).float()
        else:
            packed = self.codes.view(num_rows, -1, GROUP_SIZE // 2)
            codes = torch.cat((packed & 15, packed >> 4), -1).float()
            if self.format is WeightFormat.Q4_0:
                codes -= 8
        values = codes * self.scales.float().unsqueeze(-1)
        if self.minimums is not None:
            values += self.minimums.float().unsqueeze(-1)
        return values.flatten(1)[:, :num_columns].contiguous()


def concatenate(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Matrices of one format and K under each other, as one."""
    first = parts[0]
    assert all(part.format is first.format and part.shape[1] == first.shape[1] for part in parts)
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return QuantizedWeight(
        first.format,
        (sum(part.shape[0] for part in parts), first.shape[1]),
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minimums) if minimums else None,
    )
