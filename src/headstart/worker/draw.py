"""Drawing a token from logits: temperature, min-p, top-k, top-p. Exact, and without sorting where that can be avoided.

Owns the definitions and their numerics; knows neither requests nor penalties. Letters: R rows, V vocabulary, M values
looked at in a row.

Definitions, in this order (vLLM's; each filter alone means the same in Hugging Face transformers):
  temperature  p = softmax(logits / temperature)
  min-p        keeps tokens with p >= min_p * max(p)
  top-k        keeps the k most likely
  top-p        keeps the fewest most likely tokens whose share of the mass left so far reaches top_p (at least one)
Ranks are settled: of two equal logits the lower token id is the more likely one. So top_k=1 is greedy, and a filter's
last place never depends on a sorting algorithm (transformers keeps every token that ties with the k-th).

A token is drawn by inverting the cumulative distribution at one uniform number, in float64 relative to the row's
largest logit: any temperature from the least positive double to infinity is well defined. What is drawn for a row
depends on that row, its parameters and its number only: rows are never reduced together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SHORTLIST = 1024  # up to this top_k the k largest values are selected, not all sorted; also the first guess for top-p


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How one row is drawn, and the number that decides it."""

    uniform: float  # in [0, 1)
    temperature: float = 1.0  # > 0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 0..1
    min_p: float = 0.0  # 0..1


def argmax(logits: Tensor) -> Tensor:
    """Most likely token of each row, [R] int64; the lowest id of equal ones."""
    if logits.device.type == "cpu":  # torch's own takes ten times as long
        return torch.from_numpy(np.argmax(logits.numpy(), axis=1))
    return torch.argmax(logits, dim=1)


def draw(logits: Tensor, params: Sequence[DrawParams]) -> Tensor:
    """Token ids [R] int64 drawn from finite `logits` [R, V] float32, a row for each of `params`."""
    ways = [_way(each, logits.shape[1]) for each in params]
    if len(set(ways)) == 1:
        return ways[0](logits, _Columns.of(params, logits))
    token_ids = torch.empty(len(ways), dtype=torch.int64, device=logits.device)
    for way in dict.fromkeys(ways):
        rows = [row for row, its_way in enumerate(ways) if its_way is way]
        token_ids[rows] = way(logits[rows], _Columns.of([params[row] for row in rows], logits))
    return token_ids


@dataclass(frozen=True, slots=True)
class _Columns:
    """Parameters of R rows, each [R, 1] float64 on the logits' device; `top_k` is int64 in 1..V."""

    uniform: Tensor
    temperature: Tensor
    top_p: Tensor
    reach: Tensor  # how far below the largest min-p lets a scaled logit be: -log(min_p), infinity where it is off
    top_k: Tensor

    @classmethod
    def of(cls, params: Sequence[DrawParams], logits: Tensor) -> _Columns:
        vocab_size = logits.shape[1]
        with np.errstate(divide="ignore"):
            reach = -np.log(np.array([each.min_p for each in params]))
        top_k = [min(each.top_k, vocab_size) if each.top_k > 0 else vocab_size for each in params]
        numbers = np.array([(each.uniform, each.temperature, each.top_p) for each in params])
        packed = np.ascontiguousarray(np.column_stack([numbers, reach, top_k]).T)[:, :, None]  # [5, R, 1]
        uniform, temperature, top_p, reach_, top_k_ = torch.from_numpy(packed).to(logits.device).unbind()
        return cls(uniform, temperature, top_p, reach_, top_k_.long())

    def rows(self, index: Tensor) -> _Columns:
        return _Columns(*(getattr(self, name)[index] for name in self.__slots__))


def _way(params: DrawParams, vocab_size: int) -> Callable[[Tensor, _Columns], Tensor]:
    """The cheapest exact way for one row; decided by its own parameters alone, so never by other rows."""
    unlimited = params.top_k <= 0 or params.top_k >= vocab_size
    if unlimited and params.top_p >= 1.0:
        return _draw_unranked
    return _draw_top_p if unlimited else _draw_top_k


def _draw_unranked(logits: Tensor, params: _Columns) -> Tensor:
    """Without top-k and top-p the distribution is inverted in the order of token ids, so nothing is sorted."""
    weights = _weights(logits, params)
    return _invert(weights.cumsum_(dim=1), params.uniform).flatten()


def _draw_top_k(logits: Tensor, params: _Columns) -> Tensor:
    """Only the k largest values matter."""
    count = int(params.top_k.max())
    values = _largest(logits, count if count <= SHORTLIST else logits.shape[1])
    return _token_at(logits, values, _draw_place(values, params, total=None))


def _draw_top_p(logits: Tensor, params: _Columns) -> Tensor:
    """With top-p alone: a shortlist if it surely holds the nucleus, else all values sorted."""
    values = _largest(logits, min(SHORTLIST, logits.shape[1]))
    total = _weights(logits, params).sum(dim=1, keepdim=True)
    short = _scale(values, values[:, :1], params).neg_().exp_().sum(dim=1, keepdim=True)
    token_ids = _token_at(logits, values, _draw_place(values, params, total))
    unsure = (short <= params.top_p * total).flatten()
    if bool(unsure.any()):
        index = unsure.nonzero().flatten()
        logits, params = logits[index], params.rows(index)
        values = _largest(logits, logits.shape[1])
        token_ids[index] = _token_at(logits, values, _draw_place(values, params, total=None))
    return token_ids


def _draw_place(values: Tensor, params: _Columns, total: Tensor | None) -> Tensor:
    """Which place of `values` [R, M] (sorted, largest first) is drawn, [R, 1].

    `total`: mass that min-p leaves, where `values` may not hold all of it.
    """
    scaled = _scale(values, values[:, :1], params)  # ascending from 0
    cumulative = scaled.neg().exp_().cumsum_(dim=1)
    kept = torch.searchsorted(scaled, params.reach, right=True)
    kept = torch.minimum(kept, params.top_k)
    mass = cumulative.gather(1, kept - 1) if total is None else total
    nucleus = torch.searchsorted(cumulative, params.top_p * mass) + 1
    kept = torch.minimum(kept, nucleus)
    return _invert(cumulative, params.uniform, cumulative.gather(1, kept - 1))


def _invert(cumulative: Tensor, uniform: Tensor, total: Tensor | None = None) -> Tensor:
    """First place [R, 1] whose cumulative mass exceeds `uniform * total`; never one without mass."""
    total = cumulative[:, -1:] if total is None else total
    below = torch.nextafter(total, torch.zeros_like(total))  # the product may round up to the total
    return torch.searchsorted(cumulative, torch.minimum(uniform * total, below), right=True)


def _weights(logits: Tensor, params: _Columns) -> Tensor:
    """exp((logit - largest) / temperature), 0 where min-p drops the token; [R, V] float64."""
    distance = _scale(logits, logits.amax(dim=1, keepdim=True), params)
    dropped = distance > params.reach if bool(torch.isfinite(params.reach).any()) else None
    weights = distance.neg_().exp_()
    return weights if dropped is None else weights.masked_fill_(dropped, 0.0)


def _scale(logits: Tensor, largest: Tensor, params: _Columns) -> Tensor:
    """(largest - logit) / temperature, at least 0, float64."""
    return (largest.double() - logits).div_(params.temperature)


def _largest(logits: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row, largest first. Values, not ids: their order has no ties to break."""
    if logits.device.type != "cpu":
        return torch.topk(logits, count, dim=1).values
    negated = -logits.numpy()  # numpy selects and sorts values several times as fast as torch does
    if count < negated.shape[1]:
        negated = np.partition(negated, count - 1, axis=1)[:, :count]
    negated.sort(axis=1)
    return torch.from_numpy(negated).neg()


def _token_at(logits: Tensor, values: Tensor, place: Tensor) -> Tensor:
    """Ids [R] of the tokens in `place` [R, 1] of the sorted `values`; equal values rank by id."""
    value = values.gather(1, place)
    tie = place - torch.searchsorted(values.neg(), value.neg())
    if logits.device.type == "cpu":  # numpy again: a sixth of the time
        same = logits.numpy() == value.numpy()
        return torch.tensor([np.flatnonzero(row)[nth] for row, nth in zip(same, tie.flatten().tolist(), strict=True)])
    rows, ids = (logits == value).nonzero(as_tuple=True)
    first = torch.searchsorted(rows, torch.arange(len(logits), device=logits.device))
    return ids[first + tie.flatten()]
