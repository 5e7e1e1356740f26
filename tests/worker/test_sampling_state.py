"""The random stream and the token counts of one request."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.request import SamplingParams
from headstart.worker.sampling_state import SamplingState, TokenCounts, uniform

NUMBERS = 20_000


def test_the_stream_is_uniform_along_tokens_and_along_seeds():
    along_tokens = [uniform(1234, n) for n in range(NUMBERS)]
    along_seeds = [uniform(seed, 0) for seed in range(NUMBERS)]
    diagonal = [uniform(seed, NUMBERS - seed) for seed in range(NUMBERS)]
    for numbers in (along_tokens, along_seeds, diagonal):
        assert all(0.0 <= number < 1.0 for number in numbers)
        bins = Counter(int(number * 100) for number in numbers)
        statistic = sum((bins[index] - NUMBERS / 100) ** 2 / (NUMBERS / 100) for index in range(100))
        assert 50 < statistic < 160  # chi-square, 99 degrees of freedom: mean 99, deviation 14
        pairs = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
        assert abs(pairs) < 4 / NUMBERS**0.5


def test_the_stream_is_a_function_of_seed_and_place():
    assert uniform(7, 3) == uniform(7, 3)
    assert len({uniform(seed, n) for seed in range(100) for n in range(100)}) == 10_000
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)  # seeds count modulo 2**64


@given(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 400), max_size=300))
def test_counts_hold_every_token_once_with_its_output_count(prompt, output):
    counts = TokenCounts(np.array(prompt, dtype=np.int64))
    for token in output:
        counts.push(token)
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert len(found) == len(counts.ids)
    assert found == {token: float(output.count(token)) for token in {*prompt, *output}}


def test_a_request_without_penalties_counts_nothing():
    state = SamplingState(SamplingParams(max_tokens=1, logit_bias=((3, 1.0),)), np.array([1, 2]))
    assert state.counts is None
    assert state.changes_logits
    state.push(4)
    assert state.num_sampled == 1
