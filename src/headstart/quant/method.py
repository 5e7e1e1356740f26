"""How float matrices become codes: int8, int4 and fp8, each by a rule that is written down here.

Owns rounding. Must not know files, names of tensors, or how codes are computed with. All work is done in chunks of rows
that stay in the processor's cache. Letters: N rows, K columns, n groups of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.ops.formats import GROUP_SIZE, QuantizedWeight, WeightFormat

_CHUNK = 1 << 19  # values: 2 MB of float32
_FP8_MAX = 448.0
_INT8_MAX = 127
_INT4_MAX = 15

# Steps that the search of int4 tries, as the number of them in a group's range: below 15 the codes do not reach their
# end, above it the largest weights are clamped.
_INT4_CANDIDATES = (13.6, 14.3, 15.0, 15.7, 16.5)


class QuantizationError(ValueError):
    """Weights that the format cannot hold. The message follows a tensor's name: `tensor x <message>`."""


class QuantMethod(Protocol):
    """A rule from float weights to codes, the same codes for the same weights on every machine."""

    @property
    def name(self) -> str:
        """The configuration's word for it."""
        ...

    @property
    def version(self) -> int:
        """Raised whenever other codes come out: what was kept on disk is then made anew."""
        ...

    @property
    def format(self) -> WeightFormat: ...

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        """weight: `[N, K]` of any float dtype, on CPU. Raises `QuantizationError` for what the format cannot hold."""
        ...


class Int8:
    """Q8_0: groups of 32, symmetric. scale = max |w| / 127 in float16; code = w / that scale, within +-127.

    Every value is within half a scale of its weight. A scale too small for float16 is rounded up, so that it still is.
    """

    name = "int8"
    version = 1
    format = WeightFormat.Q8_0

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        num_rows, num_columns = weight.shape
        num_groups = -(-num_columns // GROUP_SIZE)
        codes = torch.empty(num_rows, num_groups * GROUP_SIZE, dtype=torch.int8)
        scales = torch.empty(num_rows, num_groups, dtype=torch.float16)
        for rows in _chunks(weight):
            values = weight[rows].float()
            groups = F.pad(values, (0, codes.shape[1] - num_columns)).view(-1, num_groups, GROUP_SIZE)
            largest = groups.abs().amax(-1)
            scales[rows] = rounded = _float16_scale(largest, _INT8_MAX)
            _require_finite(values, rounded)
            quotients = groups * _reciprocal(rounded).unsqueeze(-1)
            codes[rows] = quotients.round_().clamp_(-_INT8_MAX, _INT8_MAX).flatten(1).to(torch.int8)
        return QuantizedWeight(self.format, (num_rows, num_columns), codes, scales)


class Int4:
    """Q4_1: groups of 32, value = code * scale + minimum, code 0 to 15.

    The plain rule is minimum = min w and scale = (max w - min w) / 15. The search tries five steps near that one; for
    each it takes the codes that follow and fits scale and minimum to them by least squares, which has a closed form.
    The fit with the smallest squared error is rounded to float16, and the codes are computed once more from what was
    rounded. Where the plain rule, rounded the same way, has no larger error, it is taken: no group is worse than by it.
    All weights count alike: without data of the model's activations there is nothing to tell them apart.

    A last group of fewer columns is fitted to those; the padding has code 0, which means `minimum`, and meets zeros.
    """

    name = "int4"
    version = 1
    format = WeightFormat.Q4_1

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        num_rows, num_columns = weight.shape
        whole = num_columns // GROUP_SIZE * GROUP_SIZE
        num_groups = -(-num_columns // GROUP_SIZE)
        codes = torch.zeros(num_rows, num_groups * GROUP_SIZE // 2, dtype=torch.uint8)
        scales = torch.empty(num_rows, num_groups, dtype=torch.float16)
        minimums = torch.empty(num_rows, num_groups, dtype=torch.float16)
        for rows in _chunks(weight):
            values = weight[rows].float()
            for columns, width in ((slice(0, whole), GROUP_SIZE), (slice(whole, None), num_columns - whole)):
                if width == 0 or (part := values[:, columns]).shape[1] == 0:
                    continue
                some = slice(columns.start // GROUP_SIZE, columns.start // GROUP_SIZE + part.shape[1] // width)
                fitted, scale, minimum = _fit_int4(part.reshape(-1, width))
                scales[rows, some] = scale.view(-1, part.shape[1] // width)
                minimums[rows, some] = minimum.view(-1, part.shape[1] // width)
                packed = pack_nibbles(F.pad(fitted, (0, GROUP_SIZE - width)).to(torch.uint8))
                codes.view(num_rows, num_groups, -1)[rows, some] = packed.view(len(values), -1, GROUP_SIZE // 2)
        return QuantizedWeight(self.format, (num_rows, num_columns), codes, scales, minimums)


class Fp8:
    """e4m3fn with one float32 scale a row, max |w| / 448: the largest weight of a row has the largest code."""

    name = "fp8"
    version = 1
    format = WeightFormat.FP8

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        scales = torch.empty(weight.shape[0], 1)
        tiny = torch.finfo(torch.float32).tiny  # a smaller scale would have lost digits, or be zero
        for rows in _chunks(weight):
            values = weight[rows].float()
            largest = values.abs().amax(-1, keepdim=True)
            scales[rows] = scale = torch.where(largest > 0, (largest / _FP8_MAX).clamp_min(tiny), largest)
            _require_finite(values, scale)
            quotients = values / torch.where(scale > 0, scale, 1.0)
            codes[rows] = quotients.clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        return QuantizedWeight(self.format, (weight.shape[0], weight.shape[1]), codes, scales)


METHODS: Mapping[str, QuantMethod] = {method.name: method for method in (Int8(), Int4(), Fp8())}


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes 0 to 15, uint8 `[.., 32]`, as bytes `[.., 16]`: column j in the low half of byte j, j + 16 in the high."""
    half = GROUP_SIZE // 2
    return codes[..., :half] | (codes[..., half:] << 4)


def _chunks(weight: Tensor) -> Iterator[slice]:
    """Slices of rows."""
    assert weight.ndim == 2, weight.shape
    assert weight.is_floating_point(), weight.dtype
    assert weight.shape[1] > 0, weight.shape
    step = max(1, _CHUNK // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        yield slice(start, min(start + step, weight.shape[0]))


def _float16_scale(extent: Tensor, levels: int) -> Tensor:
    """extent / levels in float16, rounded up where the nearest would clamp the extent by more than half a step.

    That happens only among subnormal numbers, which have few digits, and where the quotient would round to zero.
    """
    scale = (extent / levels).half()
    short = extent > scale.float() * (levels + 0.5)
    if not bool(short.any()):
        return scale
    above = (scale.view(torch.int16) + 1).view(torch.float16)
    return torch.where(short, above, scale)


def _reciprocal(scale: Tensor) -> Tensor:
    """float32; 0 where the scale is 0."""
    wide = scale.float()
    return torch.where(wide > 0, 1.0 / wide, 0.0)


def _require_finite(values: Tensor, *parts: Tensor) -> None:
    """`parts` were derived from `values` by operations that hand on what is not finite."""
    if all(bool(part.isfinite().all()) for part in parts):
        return
    if not bool(values.isfinite().all()):
        raise QuantizationError("holds values that are not finite")
    raise QuantizationError(
        f"holds values up to {float(values.abs().amax()):.3g}, too large to quantize: their scale overflows float16"
    )


def _fit_int4(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """groups: `[n, width]`. Codes float32 `[n, width]`, scale and minimum float16 `[n]`. See `Int4`."""
    low, high = groups.amin(-1), groups.amax(-1)
    plain_scale, plain_minimum = _float16_scale(high - low, _INT4_MAX), low.half()
    _require_finite(groups, plain_scale, plain_minimum)
    slope, offset = _search(groups - low.unsqueeze(-1), high - low)
    scale, minimum = slope.half(), (low + offset).half()
    codes, error = _codes(groups, scale, minimum)
    plain_codes, plain_error = _codes(groups, plain_scale, plain_minimum)
    plain = ~(error < plain_error)  # also where the fit overflowed float16
    return (
        torch.where(plain.unsqueeze(-1), plain_codes, codes),
        torch.where(plain, plain_scale, scale),
        torch.where(plain, plain_minimum, minimum),
    )


def _search(values: Tensor, extent: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and offset `[n]` of the best fit. values: `[n, width]` from 0 to extent `[n]`.

    With codes q, the fit of `slope * q + offset` lowers the squared error by cov(v, q)^2 / var(q) below that of the
    mean alone, so that the errors themselves need not be computed.
    """
    width = values.shape[1]
    inverse = torch.where(extent > 0, 1.0 / extent, 0.0)
    normal = values * inverse.unsqueeze(-1)  # 0 to 1: no product below overflows or vanishes
    mean = normal.mean(-1)
    best, slope, offset = torch.full_like(extent, -1.0), torch.zeros_like(extent), torch.zeros_like(extent)
    for levels in _INT4_CANDIDATES:
        codes = (normal * levels).round_().clamp_(0, _INT4_MAX)
        code_mean = codes.mean(-1)
        covariance = (codes * normal).sum(-1) - width * code_mean * mean
        variance = codes.square_().sum(-1) - width * code_mean.square()
        ratio = torch.where(variance > 0, covariance / variance, 0.0)
        gain = ratio * covariance
        better = gain > best
        best = torch.where(better, gain, best)
        slope = torch.where(better, ratio, slope)
        offset = torch.where(better, mean - ratio * code_mean, offset)
    return slope * extent, offset * extent


def _codes(groups: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest codes `[n, width]` float32 under a scale and minimum, and their squared error `[n]`."""
    minimum32 = minimum.float().unsqueeze(-1)
    codes = ((groups - minimum32) * _reciprocal(scale).unsqueeze(-1)).round_().clamp_(0, _INT4_MAX)
    difference = (codes * scale.float().unsqueeze(-1)).add_(minimum32).sub_(groups)
    return codes, difference.square_().sum(-1)
