"""What sampling must remember of one request: its place in its own random stream and the tokens that penalties look at.

Owns `SamplingState`, one a request, updated incrementally. Knows no batch, no logits and no torch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headstart.core.request import SamplingParams

IntArray = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment


def uniform(seed: int, n: int) -> float:
    """The n-th number of a seed's stream, in [0, 1) with 53 bits. A pure function: no state, no other request.

    Splitmix64 (Steele, Lea, Flood 2014) used as a counter-based generator; the seed is mixed first, so that near seeds
    do not give shifted copies of one stream.
    """
    return (_mix(_mix(seed & _MASK) + (n + 1) * _GOLDEN) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class TokenCounts:
    """The distinct tokens of a request, and how often each was *sampled* (a token of the prompt alone counts 0)."""

    __slots__ = ("_counts", "_ids", "_places", "_size")

    def __init__(self, prompt_token_ids: IntArray) -> None:
        distinct = np.unique(prompt_token_ids)
        self._size = len(distinct)
        self._ids = np.empty(self._size + 64, dtype=np.int64)
        self._ids[: self._size] = distinct
        self._counts = np.zeros(self._size + 64, dtype=np.float64)
        self._places = {int(token): place for place, token in enumerate(distinct)}

    @property
    def ids(self) -> IntArray:  # [U]
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float64]:  # [U]
        return self._counts[: self._size]

    def push(self, token_id: int) -> None:
        """Count one sampled token."""
        place = self._places.setdefault(token_id, self._size)
        if place == self._size:
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._size += 1
        self._counts[place] += 1


class SamplingState:
    """One request as the sampler sees it. Owner: the request's `RequestState`."""

    __slots__ = ("bias_ids", "bias_values", "counts", "num_sampled", "params")

    def __init__(self, params: SamplingParams, prompt_token_ids: IntArray) -> None:
        self.params = params
        self.num_sampled = 0
        bias = dict(params.logit_bias)
        self.bias_ids: IntArray = np.array(list(bias), dtype=np.int64)
        self.bias_values = np.array(list(bias.values()), dtype=np.float64)
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self.counts = TokenCounts(prompt_token_ids) if penalties != (1.0, 0.0, 0.0) else None

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or a bias move this request's logits before the choice."""
        return self.counts is not None or len(self.bias_ids) > 0

    def next_uniform(self) -> float:
        """The random number that the next token is drawn with."""
        return uniform(self.params.seed, self.num_sampled)

    def push(self, token_id: int) -> None:
        """The next token was chosen."""
        self.num_sampled += 1
        if self.counts is not None:
            self.counts.push(token_id)
