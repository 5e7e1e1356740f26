"""The sampler as a whole: who gets what, reproducibly, whatever else is in the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstart.core.request import SamplingParams
from headstart.worker.sampler import Sampler, finite_rows
from headstart.worker.sampling_state import SamplingState

pytestmark = pytest.mark.usefixtures("one_thread")

V = 97


def state(prompt: tuple[int, ...] = (1,), **params) -> SamplingState:
    return SamplingState(SamplingParams(max_tokens=1000, **params), np.array(prompt, dtype=np.int64))


def logits_of(rows: int, vocab: int = V, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def tokens(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    return [each.token_id for each in Sampler().sample(logits.clone(), states)]


def test_greedy_rows_take_the_argmax_and_equals_the_lowest_id():
    logits = logits_of(5)
    logits[2, 10] = logits[2, 60] = 50.0
    found = tokens(logits, [state(temperature=0.0) for _ in range(5)])
    assert found == [max(range(V), key=lambda token: (row[token], -token)) for row in logits.tolist()]
    assert found[2] == 10


FILTERS = {
    "temperature": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "top_k": ({"top_k": 9}, [TopKLogitsWarper(9)]),
    "top_p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "min_p": ({"min_p": 0.07}, [MinPLogitsWarper(0.07)]),
    "top_k, top_p": (
        {"temperature": 1.4, "top_k": 20, "top_p": 0.9},
        [TemperatureLogitsWarper(1.4), TopKLogitsWarper(20), TopPLogitsWarper(0.9)],
    ),
    "min_p, top_k": (
        {"temperature": 1.8, "top_k": 12, "min_p": 0.02},
        [TemperatureLogitsWarper(1.8), TopKLogitsWarper(12), MinPLogitsWarper(0.02)],
    ),
}


@pytest.mark.parametrize("name", FILTERS)
def test_seeded_draws_follow_the_distribution_of_transformers(name):
    """Chi-square of 16,000 draws with fixed seeds against transformers' probabilities."""
    params, warpers = FILTERS[name]
    logits = logits_of(1, vocab=40, seed=11, scale=1.5)
    probabilities = LogitsProcessorList(warpers)(torch.tensor([[0]]), logits.clone()).softmax(-1)[0].double()
    draws = 16_000
    states = [state(seed=seed, **params) for seed in range(draws)]
    counts = torch.bincount(torch.tensor(tokens(logits.repeat(draws, 1), states)), minlength=40).double()
    expected = probabilities * draws
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()
    freedom = int(kept.sum()) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_successive_tokens_of_one_seed_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    probabilities = logits.softmax(-1)[0]
    one = state(seed=3)
    found = torch.tensor([tokens(logits, [one])[0] for _ in range(2500)])
    shares = torch.bincount(found, minlength=3) / 2500
    assert (shares - probabilities).abs().max() < 0.03


_params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-6, 0.7, 1.0, 50.0]),
        "top_k": st.sampled_from([0, 1, 5, 5000]),
        "top_p": st.sampled_from([1.0, 0.9, 1e-8]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "repetition_penalty": st.sampled_from([1.0, 1.2]),
        "presence_penalty": st.sampled_from([0.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, -0.3]),
        "logit_bias": st.sampled_from([(), ((5, 100.0), (7, -100.0)), ((96, 2.0),)]),
        "seed": st.integers(0, 2**63 - 1),
        "logprobs": st.sampled_from([None, 0, 3]),
    }
)


@settings(max_examples=40, deadline=None)
@given(st.lists(_params, min_size=2, max_size=9), st.randoms(use_true_random=False))
def test_a_request_is_sampled_alike_alone_and_in_any_batch(requests, random):
    """Each request's tokens and logprobs over 4 steps: alone, and in a batch whose order and members change."""
    steps = 4
    logits = logits_of(len(requests) * steps, seed=2).view(steps, len(requests), V)
    alone = []
    for index, params in enumerate(requests):
        one = state(**params)
        alone.append([Sampler().sample(logits[step, index : index + 1].clone(), [one])[0] for step in range(steps)])

    states = [state(**params) for params in requests]
    together = [[] for _ in requests]
    while any(len(found) < steps for found in together):
        open_rows = [index for index, found in enumerate(together) if len(found) < steps]
        members = random.sample(open_rows, random.randint(1, len(open_rows)))
        rows = torch.stack([logits[len(together[index]), index] for index in members])
        for index, sampled in zip(members, Sampler().sample(rows, [states[index] for index in members]), strict=True):
            together[index].append(sampled)
    assert [[each.token_id for each in found] for found in together] == [[e.token_id for e in found] for found in alone]
    assert together == alone


def test_two_seeds_differ_and_one_repeats():
    logits = logits_of(1, scale=0.5)
    runs = {seed: [] for seed in (1, 2, 3)}
    for seed, found in runs.items():
        one = state(seed=seed)
        found += [tokens(logits, [one])[0] for _ in range(20)]
    assert len({tuple(found) for found in runs.values()}) == 3
    again = state(seed=1)
    assert [tokens(logits, [again])[0] for _ in range(20)] == runs[1]


def test_penalties_see_the_tokens_sampled_so_far():
    """With a strong frequency penalty and equal logits, greedy choice walks through the vocabulary in order."""
    logits = torch.zeros(1, 5)
    one = state(prompt=(0,), temperature=0.0, frequency_penalty=1.0)
    assert [tokens(logits, [one])[0] for _ in range(11)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]


def test_bias_of_a_hundred_forces_and_forbids():
    logits = logits_of(2, seed=4)
    best = int(logits[1].argmax())
    found = tokens(logits, [state(logit_bias=((42, 100.0),)), state(temperature=0.0, logit_bias=((best, -100.0),))])
    assert found[0] == 42
    assert found[1] == int(logits[1].topk(2).indices[1])


def test_logprobs_come_from_the_raw_logits():
    logits = logits_of(3, seed=5)
    expected = logits.log_softmax(-1)
    params = {"temperature": 0.3, "logit_bias": ((42, 100.0),), "repetition_penalty": 1.5}
    first, second, third = Sampler().sample(
        logits.clone(), [state(logprobs=2, **params), state(temperature=0.0), state(temperature=0.0, logprobs=0)]
    )
    assert first.token_id == first.logprob.token_id == 42
    assert first.logprob.logprob == pytest.approx(expected[0, 42].item(), abs=1e-5)
    assert first.logprob.rank == int((logits[0] > logits[0, 42]).sum()) + 1
    assert [token for token, _ in first.logprob.top] == logits[0].topk(2).indices.tolist()
    assert second.logprob is None
    assert third.logprob.rank == 1
    assert third.logprob.top == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_gets_an_error_and_harms_no_other(bad):
    kinds = [{"temperature": 0.0}, {"top_k": 5, "seed": 1}, {"top_p": 0.7, "seed": 2, "logprobs": 1}]
    logits = logits_of(3, seed=6)
    for broken in range(3):
        poisoned = logits.clone()
        poisoned[broken, 50] = bad
        states = [state(**kind) for kind in kinds]
        results = Sampler().sample(poisoned, states)
        healthy = Sampler().sample(logits.clone(), [state(**kind) for kind in kinds])
        for row, (result, expected) in enumerate(zip(results, healthy, strict=True)):
            if row == broken:
                assert "not finite" in result.error
                assert states[row].num_sampled == 0
            else:
                assert result == expected
                assert states[row].num_sampled == 1


def test_large_but_finite_logits_are_finite():
    logits = torch.full((2, 10), 3e38)  # their sum is not
    logits[1, 3] = math.nan
    assert finite_rows(logits) == [True, False]
    assert Sampler().sample(logits[:1], [state(temperature=0.0)])[0].token_id == 0
