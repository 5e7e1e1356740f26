"""Logprobs, ranks and alternatives, ties included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.worker.logprobs import token_logprobs
from tests.worker.oracles import logprob_and_rank

pytestmark = pytest.mark.usefixtures("one_thread")

_logit = st.one_of(st.sampled_from([-1.0, 0.0, 2.0]), st.floats(-40, 40, width=32))


@settings(deadline=None)
@given(st.data(), st.integers(1, 30), st.integers(1, 4))
def test_rows_match_the_oracle(data, vocab, rows):
    logits = torch.tensor([[data.draw(_logit) for _ in range(vocab)] for _ in range(rows)], dtype=torch.float32)
    tokens = [data.draw(st.integers(0, vocab - 1)) for _ in range(rows)]
    tops = [data.draw(st.integers(0, vocab + 3)) for _ in range(rows)]
    for row, found in enumerate(token_logprobs(logits, tokens, tops)):
        values = logits[row].tolist()
        logprob, rank = logprob_and_rank(values, tokens[row])
        assert found.token_id == tokens[row]
        assert found.logprob == pytest.approx(logprob, abs=1e-9)
        assert found.rank == rank
        likeliest = sorted(range(vocab), key=lambda token: (-values[token], token))[: tops[row]]
        assert [token for token, _ in found.top] == likeliest
        for token, value in found.top:
            assert value == pytest.approx(logprob_and_rank(values, token)[0], abs=1e-9)


def test_a_tie_at_the_edge_of_the_alternatives_goes_to_the_lowest_id():
    logits = torch.zeros(2, 5000)
    logits[:, 4000] = 1.0
    for found in token_logprobs(logits, [17, 4000], [3, 1]):
        assert [token for token, _ in found.top] == [4000, 0, 1][: len(found.top)]


def test_no_alternatives_asked_for():
    (found,) = token_logprobs(torch.tensor([[0.0, 0.0]]), [1], [0])
    assert found.top == ()
    assert found.rank == 2
