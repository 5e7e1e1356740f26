"""Log-probabilities for callers that ask: of given tokens, their ranks and the most likely alternatives.

Owns `TokenLogprob`s' numerics; knows neither requests nor sampling. Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.core.step import TokenLogprob


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """For each row of finite raw `logits` [R, V]: logprob and rank of its token, and the `num_top` likeliest tokens.

    Equal logits rank by token id, so ranks are distinct, and the token at rank r <= num_top is the r-th of `top`.
    """
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    values = logits.gather(1, chosen)
    normalizers = torch.logsumexp(logits.double(), dim=1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    ahead = (logits > values) | ((logits == values) & (ids < chosen))
    ranks = (torch.count_nonzero(ahead, dim=1) + 1).tolist()
    logprobs = (values - normalizers).flatten().tolist()
    tops = _top(logits, normalizers, num_top)
    return [TokenLogprob(*fields) for fields in zip(token_ids, logprobs, ranks, tops, strict=True)]


def _top(logits: Tensor, normalizers: Tensor, num_top: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    vocab_size = logits.shape[1]
    largest = min(max(num_top, default=0), vocab_size)
    if largest == 0:
        return [()] * len(num_top)
    # One more than asked for: a tie at the edge shows as two equal neighbours too.
    values, ids = torch.topk(logits, min(largest + 1, vocab_size), dim=1)
    for row in (values[:, 1:] == values[:, :-1]).any(dim=1).nonzero().flatten().tolist():
        ordered = torch.sort(logits[row], descending=True, stable=True)  # topk does not say which of equals it takes
        values[row], ids[row] = ordered.values[: values.shape[1]], ordered.indices[: ids.shape[1]]
    logprobs = (values - normalizers).tolist()
    return [
        tuple(zip(row_ids[:count], row_logprobs[:count], strict=True))
        for row_ids, row_logprobs, count in zip(ids.tolist(), logprobs, num_top, strict=True)
    ]
