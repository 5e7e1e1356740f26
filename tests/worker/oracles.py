"""Slow and obvious versions of what the sampler does, one row at a time, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Distribution:
    """Probabilities by token id (0 for filtered ones); `margin` is the distance of the nearest filter decision."""

    probabilities: list[float]
    margin: float


def distribution(
    logits: Sequence[float], temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Distribution:
    largest = max(logits)
    weights = [math.exp((logit - largest) / temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    margin = math.inf

    kept = []
    for token in order:
        if min_p > 0:
            margin = min(margin, abs(weights[token] - min_p))
        if weights[token] >= min_p:
            kept.append(token)
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1:
        mass = math.fsum(weights[token] for token in kept)
        nucleus: list[int] = []
        for token in kept:
            share = math.fsum(weights[each] for each in nucleus) / mass
            margin = min(margin, abs(share - top_p))
            if nucleus and share >= top_p:
                break
            nucleus.append(token)
        kept = nucleus
    mass = math.fsum(weights[token] for token in kept)
    probabilities = [0.0] * len(logits)
    for token in kept:
        probabilities[token] = weights[token] / mass
    return Distribution(probabilities, margin)


def adjusted(
    logits: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: dict[int, float] | None = None,
) -> list[float]:
    result = [float(logit) for logit in logits]
    for token, value in (bias or {}).items():
        result[token] += value
    for token in {*prompt, *output}:
        result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
    for token in set(output):
        result[token] -= frequency * output.count(token) + presence
    return result


def logprob_and_rank(logits: Sequence[float], token: int) -> tuple[float, int]:
    largest = max(logits)
    normalizer = largest + math.log(math.fsum(math.exp(logit - largest) for logit in logits))
    order = sorted(range(len(logits)), key=lambda each: (-logits[each], each))
    return logits[token] - normalizer, order.index(token) + 1
