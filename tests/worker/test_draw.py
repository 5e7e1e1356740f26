"""Drawing: against a slow oracle, at the edges of every parameter, and never influenced by other rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headstart.worker import draw as draw_module
from headstart.worker.draw import DrawParams, argmax, draw
from headstart.worker.sampling_state import uniform
from tests.worker.oracles import distribution

pytestmark = pytest.mark.usefixtures("one_thread")

GRID = 4000  # evenly spaced uniforms: a token of probability p is drawn p * GRID times, up to rounding at its two ends


def drawn_counts(logits: list[float], **kinds: float) -> list[int]:
    """How often each token is drawn over the grid."""
    rows = torch.tensor([logits], dtype=torch.float32).repeat(GRID, 1)
    token_ids = draw(rows, [DrawParams((place + 0.5) / GRID, **kinds) for place in range(GRID)])
    return torch.bincount(token_ids, minlength=len(logits)).tolist()


# A few values only, so that ties are common; and arbitrary ones.
_logit = st.one_of(st.sampled_from([-2.0, 0.0, 0.5, 3.0]), st.floats(-30, 30, width=32))
_kinds = st.fixed_dictionaries(
    {
        "temperature": st.one_of(st.sampled_from([1e-6, 1.0, 1e6]), st.floats(0.05, 5.0)),
        "top_k": st.integers(0, 45),
        "top_p": st.one_of(st.just(1.0), st.just(1e-9), st.floats(0.01, 0.999)),
        "min_p": st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    }
)


@settings(max_examples=80, deadline=None)
@given(st.lists(_logit, min_size=1, max_size=41), _kinds, st.integers(1, 50))
def test_every_token_is_drawn_as_often_as_the_oracle_says(logits, kinds, shortlist):
    logits = torch.tensor(logits, dtype=torch.float32).tolist()
    expected = distribution(logits, **kinds)
    assume(expected.margin > 1e-9)
    original = draw_module.SHORTLIST
    draw_module.SHORTLIST = shortlist  # so that both ways to rank, and the step from one to the other, are taken
    try:
        counts = drawn_counts(logits, **kinds)
    finally:
        draw_module.SHORTLIST = original
    for token, probability in enumerate(expected.probabilities):
        assert abs(counts[token] - probability * GRID) <= 1 + 1e-6, (token, probability, counts[token])
        assert counts[token] == 0 or probability > 0


@pytest.mark.parametrize("top_p", [0.0, 1e-300, 1e-9])
def test_a_top_p_of_nearly_nothing_keeps_the_most_likely_token(top_p):
    assert drawn_counts([0.0, 2.0, 2.0, 1.0], top_p=top_p) == [0, GRID, 0, 0]


def test_top_k_of_one_is_greedy_even_among_equals():
    assert drawn_counts([1.0, 5.0, 5.0, 5.0], top_k=1) == [0, GRID, 0, 0]


def test_equal_logits_fill_top_p_by_token_id():
    assert drawn_counts([1.0] * 8, top_p=0.5) == [GRID // 4] * 4 + [0] * 4
    assert drawn_counts([1.0] * 8, top_p=0.500001) == [GRID // 5] * 5 + [0] * 3


def test_top_k_beyond_the_vocabulary_is_no_filter():
    assert drawn_counts([0.0] * 5, top_k=1000, top_p=1.0) == [GRID // 5] * 5


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6])
def test_a_tiny_temperature_draws_the_largest_logit(temperature):
    assert drawn_counts([1.0, 1.001, -50.0], temperature=temperature) == [0, GRID, 0]


@pytest.mark.parametrize("temperature", [1e30, 1e300, math.inf])
def test_a_huge_temperature_is_uniform(temperature):
    assert drawn_counts([100.0, -100.0, 0.0, 3.0], temperature=temperature) == [GRID // 4] * 4


def test_logits_as_far_apart_as_float32_allows():
    largest = torch.finfo(torch.float32).max
    assert drawn_counts([-largest, largest, 0.0], top_p=0.9) == [0, GRID, 0]
    assert drawn_counts([-largest, largest, 0.0], min_p=0.1) == [0, GRID, 0]


@pytest.mark.parametrize("kinds", [{}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.2}])
def test_the_ends_of_the_unit_interval_draw_tokens_that_are_kept(kinds):
    logits = torch.tensor([[3.0, 2.9, 2.8, -1000.0, -1000.0]]).repeat(2, 1)
    token_ids = draw(logits, [DrawParams(0.0, **kinds), DrawParams(1.0 - 2.0**-53, **kinds)])
    assert set(token_ids.tolist()) <= {0, 1, 2}
    assert token_ids[0] == 0


def _mixed(rows: int) -> list[DrawParams]:
    """Rows of every kind: unfiltered, small and large top-k, peaked and flat top-p, min-p."""
    cycle = [(1.0, 0, 1.0, 0.0), (0.8, 20, 1.0, 0.0), (1.0, 2000, 0.9, 0.0), (0.3, 0, 0.9, 0.0), (8.0, 0, 0.95, 0.0)]
    cycle += [(1.0, 0, 1.0, 0.05), (1.0, 50, 0.9, 0.01), (1.3, 0, 0.8, 0.001)]
    return [DrawParams(uniform(5, row), *cycle[row % len(cycle)]) for row in range(rows)]


def test_a_row_is_drawn_alike_alone_and_among_others():
    logits = torch.randn(64, 3001, generator=torch.Generator().manual_seed(1)) * 4
    params = _mixed(64)
    together = draw(logits, params).tolist()
    assert together == [draw(logits[row : row + 1], params[row : row + 1]).item() for row in range(64)]
    assert together == draw(logits.flip(0), params[::-1]).flip(0).tolist()


def test_argmax_takes_the_lowest_id_of_equals():
    logits = torch.zeros(3, 1000)
    logits[1, 700] = logits[1, 30] = 1.0
    logits[2] = -5.0
    logits[2, 999] = -1.0
    assert argmax(logits).tolist() == [0, 30, 999]
