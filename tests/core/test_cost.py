"""The numbers of a step's work, and costs that are said beforehand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.cost import LinearCosts, StepWork, context_of

COSTS = LinearCosts(step=0.5, prefill_token=1.0, prefill_context=0.01, decode=2.0, decode_context=0.02, sample=0.25)


@given(start=st.integers(0, 50), count=st.integers(0, 50))
def test_context_is_the_sum_over_tokens(start: int, count: int) -> None:
    assert context_of(start, count) == sum(position + 1 for position in range(start, start + count))


def test_a_step_costs_the_sum_of_its_parts() -> None:
    work = StepWork(num_decodes=2, decode_context=30, num_samples=2).with_prefill(4, 3, samples=True)
    assert work == StepWork(3, 1, 5 + 6 + 7, 2, 30, 3)
    assert COSTS.step_seconds(work) == pytest.approx(0.5 + 3 * 1.0 + 18 * 0.01 + 2 * 2.0 + 30 * 0.02 + 3 * 0.25)


def test_prefill_adds_what_the_step_grows_by() -> None:
    before = StepWork(num_decodes=1, decode_context=9, num_samples=1)
    grown = COSTS.step_seconds(before.with_prefill(7, 5, samples=False)) - COSTS.step_seconds(before)
    assert COSTS.prefill_seconds(7, 5) == pytest.approx(grown)
    assert COSTS.prefill_seconds(7, 0) == 0


def test_it_never_learns() -> None:
    COSTS.observe(StepWork(num_prefill_tokens=1), 1e9)
    assert COSTS.step_seconds(StepWork()) == 0.5
