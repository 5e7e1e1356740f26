"""Drawing a token from logits: temperature, min-p, top-k, top-p. Exact, and without sorting where that can be avoided.

Owns the definitions and their numerics; knows neither requests nor penalties. Letters: R rows, V vocabulary, M values
looked at in a row.

Definitions, in this order (vLLM's; each filter alone means the same in Hugging Face transformers):
  temperature  p = softmax(logits / temperature)
  min-p        keeps tokens with p >= min_p * max(p)
  top-k        keeps the k most likely
  top-p        keeps the fewest most likely tokens whose share of the mass left so far reaches top_p (at least one)
Ranks are settled: of two equal logits the lower token id is the more likely one. So top_k=1 is greedy, and a filter's last
place never depends on a sorting algorithm (transformers keeps every token that ties with the k-th).

A token is drawn by inverting the cumulative distribution at one uniform number, in float64 relative to the row's largest
logit: any temperature from the least positive double to infinity is well defined. What is drawn for a row depends on
that row, its parameters and its number only: rows are never reduced together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SHORTLIST = 1024  # largest top_k for which a selection of k values replaces a sort of all; also the first guess for top-p


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Parameters of R rows, each [R, 1] float64 on the logits' device; `top_k` is int64 in 1..V."""

    temperature: Tensor  # > 0
    top_k: Tensor
    top_p: Tensor  # 0..1
    min_p: Tensor  # 0..1
    uniform: Tensor  # in [0, 1)

    def rows(self, index: Tensor | slice) -> DrawParams:
        return DrawParams(
            self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index], self.uniform[index]
        )


def argmax(logits: Tensor) -> Tensor:
    """Most likely token of each row, [R] int64; the lowest id of equal ones."""
    if logits.device.type == "cpu":  # torch's own takes ten times as long
        return torch.from_numpy(np.argmax(logits.numpy(), axis=1))
    return torch.argmax(logits, dim=1)


def draw(logits: Tensor, params: DrawParams) -> Tensor:
    """Token ids [R] int64 drawn from finite `logits` [R, V] float32."""
    unranked = (params.top_k >= logits.shape[1]) & (params.top_p >= 1.0)
    selected = params.top_k <= SHORTLIST
    kinds = (unranked.long() + 2 * (selected & ~unranked).long()).flatten().tolist()
    token_ids = torch.empty(len(kinds), dtype=torch.int64, device=logits.device)
    for kind, draw_rows in ((0, _draw_top_p), (1, _draw_unranked), (2, _draw_top_k)):
        rows = [row for row, its_kind in enumerate(kinds) if its_kind == kind]
        if len(rows) == len(kinds):
            return draw_rows(logits, params)
        if rows:
            index = torch.tensor(rows, device=logits.device)
            token_ids[index] = draw_rows(logits[index], params.rows(index))
    return token_ids


def _draw_unranked(logits: Tensor, params: DrawParams) -> Tensor:
    """Rows without top-k and top-p: the distribution is inverted in the order of token ids, so nothing is sorted."""
    weights = _weights(logits, params)
    return _invert(weights.cumsum_(dim=1), params.uniform).flatten()


def _draw_top_k(logits: Tensor, params: DrawParams) -> Tensor:
    """Rows with a small top-k: only the k largest values matter."""
    values = _largest(logits, int(params.top_k.max()))
    return _token_at(logits, values, _draw_place(values, params, total=None))


def _draw_top_p(logits: Tensor, params: DrawParams) -> Tensor:
    """Rows with top-p: a shortlist if it surely holds the nucleus, else all values sorted."""
    values = _largest(logits, min(SHORTLIST, logits.shape[1]))
    total = _weights(logits, params).sum(dim=1, keepdim=True)
    short = _exp_of_sorted(values, params).sum(dim=1, keepdim=True)
    # With a top_k past the shortlist `total` is not what top-p is a share of.
    unsure = ((short <= params.top_p * total) | (params.top_k < logits.shape[1])).flatten()
    token_ids = _token_at(logits, values, _draw_place(values, params, total))
    if bool(unsure.any()):
        index = unsure.nonzero().flatten()
        logits, params = logits[index], params.rows(index)
        values = _largest(logits, logits.shape[1])
        token_ids[index] = _token_at(logits, values, _draw_place(values, params, total=None))
    return token_ids


def _draw_place(values: Tensor, params: DrawParams, total: Tensor | None) -> Tensor:
    """Which place of `values` [R, M] (sorted, largest first) is drawn, [R, 1].

    `total`: mass that min-p leaves, where `values` may not hold all of it.
    """
    scaled = _scale(values, values[:, :1], params)  # ascending from 0: how far below the largest
    cumulative = scaled.neg().exp_().cumsum_(dim=1)
    kept = torch.searchsorted(scaled, -params.min_p.log(), right=True)
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


def _weights(logits: Tensor, params: DrawParams) -> Tensor:
    """exp((logit - largest) / temperature), 0 where min-p drops the token; [R, V] float64."""
    distance = _scale(logits, logits.amax(dim=1, keepdim=True), params)
    dropped = distance > -params.min_p.log() if bool((params.min_p > 0).any()) else None
    weights = distance.neg_().exp_()
    return weights if dropped is None else weights.masked_fill_(dropped, 0.0)


def _exp_of_sorted(values: Tensor, params: DrawParams) -> Tensor:
    return _scale(values, values[:, :1], params).neg_().exp_()


def _scale(logits: Tensor, largest: Tensor, params: DrawParams) -> Tensor:
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
    rows, ids = (logits == value).nonzero(as_tuple=True)
    first = torch.searchsorted(rows, torch.arange(len(logits), device=logits.device))
    return ids[first + tie.flatten()]
