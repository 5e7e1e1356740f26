"""How one model's predictions of a text differ from another's: perplexity, KL divergence, agreement. Arithmetic only.

Letters: R predictions (rows of logits), V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Scores:
    """Of each prediction: what the token that came cost, how far the distribution is from the reference's (nats)."""

    costs: list[Tensor] = field(default_factory=list)  # each [R]: -log p(token that came)
    divergences: list[Tensor] = field(default_factory=list)  # each [R]: KL(reference || this)
    agreements: list[Tensor] = field(default_factory=list)  # each [R] bool: the same likeliest token

    def add(self, logprobs: Tensor, reference: Tensor, came: Tensor) -> None:
        """logprobs, reference: `[R, V]` float32; came: `[R]` token ids."""
        self.costs.append(-logprobs.gather(1, came.unsqueeze(1)).squeeze(1))
        self.divergences.append(divergence(reference, logprobs))
        self.agreements.append(logprobs.argmax(1) == reference.argmax(1))

    @property
    def num_predictions(self) -> int:
        return sum(len(some) for some in self.costs)


@dataclass(frozen=True, slots=True)
class Quality:
    """One format against its reference. Errors are standard errors, predictions taken as independent."""

    perplexity: float
    change: float  # of the perplexity, as a share of the reference's
    change_error: float
    divergence: float  # mean KL, nats
    divergence_p99: float
    agreement: float  # share of predictions with the same likeliest token


def divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other), `[R]` nats, of log-probabilities `[R, V]`. Rounding may leave it a little below zero."""
    return (reference.exp() * (reference - other)).sum(1)


def quality(scores: Scores, reference: Scores) -> Quality:
    """What a format cost on the text. Both have seen the same tokens, so that their costs are compared in pairs."""
    costs, base = torch.cat(scores.costs).double(), torch.cat(reference.costs).double()
    more = costs - base
    ratio = math.exp(float(more.mean()))
    error = float(more.std(correction=1)) / math.sqrt(len(more)) if len(more) > 1 else math.nan
    divergences = torch.cat(scores.divergences).double()
    return Quality(
        perplexity=math.exp(float(costs.mean())),
        change=ratio - 1,
        change_error=ratio * error,
        divergence=float(divergences.mean()),
        divergence_p99=float(divergences.quantile(0.99)),
        agreement=float(torch.cat(scores.agreements).double().mean()),
    )
