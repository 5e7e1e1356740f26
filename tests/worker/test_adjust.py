"""Bias and penalties: against a slow oracle and against transformers' logits processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from headstart.core.request import SamplingParams
from headstart.worker.adjust import adjust_logits
from headstart.worker.sampling_state import SamplingState
from tests.worker.oracles import adjusted

V = 23


def state(prompt: list[int], output: list[int], **params) -> SamplingState:
    made = SamplingState(SamplingParams(max_tokens=99, **params), np.array(prompt, dtype=np.int64))
    for token in output:
        made.push(token)
    return made


_token = st.integers(0, V - 1)
_request = st.fixed_dictionaries(
    {
        "prompt": st.lists(_token, min_size=1, max_size=12),
        "output": st.lists(_token, max_size=30),
        "repetition": st.one_of(st.just(1.0), st.floats(0.5, 2.0)),
        "presence": st.one_of(st.just(0.0), st.floats(-2, 2)),
        "frequency": st.one_of(st.just(0.0), st.floats(-2, 2)),
        "bias": st.dictionaries(_token, st.floats(-100, 100), max_size=5),
    }
)

pytestmark = pytest.mark.usefixtures("one_thread")


@settings(deadline=None)
@given(st.lists(_request, min_size=1, max_size=5), st.integers(0, 1000))
def test_a_batch_of_requests_matches_the_oracle(requests, seed):
    logits = torch.randn(len(requests), V, generator=torch.Generator().manual_seed(seed)) * 3
    expected = [adjusted(row.tolist(), **request) for row, request in zip(logits, requests, strict=True)]
    states = [
        state(
            each["prompt"],
            each["output"],
            repetition_penalty=each["repetition"],
            presence_penalty=each["presence"],
            frequency_penalty=each["frequency"],
            logit_bias=tuple(each["bias"].items()),
        )
        for each in requests
    ]
    adjust_logits(logits, states)
    torch.testing.assert_close(logits, torch.tensor(expected), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("penalty", [0.8, 1.3])
def test_repetition_penalty_is_the_one_of_transformers(penalty):
    prompt, output = [1, 1, 5, 9], [5, 7, 7]
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(3))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
    adjust_logits(logits, [state(prompt, output, repetition_penalty=penalty)])
    torch.testing.assert_close(logits, expected)


def test_presence_and_frequency_do_not_look_at_the_prompt():
    logits = torch.zeros(1, V)
    adjust_logits(logits, [state([1, 2, 3], [4, 4], presence_penalty=0.5, frequency_penalty=0.25)])
    assert logits[0].nonzero().flatten().tolist() == [4]
    assert logits[0, 4].item() == -1.0


def test_rows_without_a_request_for_it_stay_bit_equal():
    logits = torch.randn(3, V)
    before = logits.clone()
    adjust_logits(logits, [state([1], [2]), state([1], [2], logit_bias=((0, 5.0),)), state([3], [])])
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert logits[1, 0] == before[1, 0] + 5.0


def test_no_setting_makes_a_row_non_finite():
    logits = torch.full((1, V), 3e38)
    adjust_logits(logits, [state([1], [2, 2], repetition_penalty=1e-30, logit_bias=((4, 1e38), (5, 100.0)))])
    assert torch.isfinite(logits).all()
