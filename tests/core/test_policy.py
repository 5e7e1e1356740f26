"""Who goes first: what each policy and each of its knobs does, shown on small schedules."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.harness import Driver, lengths, make_core, make_spec, prompt


def test_a_short_prompt_passes_a_half_done_long_one_which_keeps_its_blocks() -> None:
    driver = Driver.of(make_core(chunk=16, mixed=16, max_num_seqs=8, srpf_weight=1000))
    driver.add(make_spec("long", prompt(100)))
    driver.step()
    driver.add(make_spec("short", prompt(16, 1), arrival=driver.now))
    assert lengths(driver.step()) == {"short": 16}
    step = driver.step()
    assert lengths(step) == {"short": 1, "long": 16}
    assert step is not None
    assert step.chunks[1].start == 16, "the long one goes on where it paused"


def test_fcfs_lets_nobody_pass() -> None:
    driver = Driver.of(make_core(policy="fcfs", chunk=16, max_num_seqs=8, mixed=16))
    driver.add(make_spec("long", prompt(40)))
    driver.step()
    driver.add(make_spec("short", prompt(4, 1), arrival=driver.now))
    assert lengths(driver.step()) == {"long": 16}


@pytest.mark.parametrize(("aging_ms", "first"), [(2_000, "long"), (60_000, "short")])
def test_aging_bounds_how_long_a_request_is_passed(aging_ms: int, first: str) -> None:
    driver = Driver.of(make_core(chunk=8, mixed=8, max_num_seqs=4, aging_ms=aging_ms, srpf_weight=1000))
    driver.add(make_spec("long", prompt(50), arrival=0))
    driver.add(make_spec("short", prompt(4, 1), arrival=3))
    assert next(iter(lengths(driver.step()))) == first


@pytest.mark.parametrize(("per_token", "first"), [(0, "long"), (100, "short")])
def test_srpf_weight_is_what_a_shorter_prompt_is_worth(per_token: int, first: str) -> None:
    driver = Driver.of(make_core(chunk=8, mixed=8, max_num_seqs=4, srpf_weight=per_token))
    driver.add(make_spec("long", prompt(50), arrival=0))
    driver.add(make_spec("short", prompt(4, 1), arrival=1))
    assert next(iter(lengths(driver.step()))) == first


@pytest.mark.parametrize(("step_ms", "first"), [(60_000, "vip"), (500, "early")])
def test_a_level_of_priority_is_worth_priority_step_ms(step_ms: int, first: str) -> None:
    driver = Driver.of(make_core(policy="fcfs", chunk=8, mixed=8, max_num_seqs=4, priority_step_ms=step_ms))
    driver.add(make_spec("early", prompt(8), arrival=0))
    driver.add(make_spec("vip", prompt(8, 1), arrival=1, priority=-1))
    assert next(iter(lengths(driver.step()))) == first


def test_srpf_counts_uncached_tokens_only() -> None:
    driver = Driver.of(make_core(chunk=64, mixed=64, max_num_seqs=4, srpf_weight=1000))
    driver.add(make_spec("warm-up", prompt(40), max_tokens=1))
    driver.drain()
    driver.add(make_spec("cold", prompt(20, 1), arrival=driver.now))
    driver.add(make_spec("warm", [*prompt(40), 6], arrival=driver.now))
    step = driver.step()
    assert next(iter(lengths(step).items())) == ("warm", 1)


def test_a_waiting_request_moves_up_when_its_prefix_becomes_cached() -> None:
    core = make_core(chunk=48, mixed=48, max_num_seqs=1, srpf_weight=1000)
    driver = Driver.of(core)
    driver.add(make_spec("first", prompt(40), max_tokens=2))
    driver.step()
    driver.add(make_spec("cold", prompt(20, 1), arrival=driver.now))
    driver.add(make_spec("follow", [*prompt(40), 6], arrival=driver.now))
    driver.step()  # "first" ends; only one may run at once
    assert lengths(driver.step()) == {"follow": 1}


@given(
    works=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20)), min_size=2, max_size=12),
    aging_ms=st.integers(0, 10_000),
)
def test_nobody_is_passed_by_those_who_arrive_beyond_the_bound(works: list[tuple[int, int]], aging_ms: int) -> None:
    """Starting one at a time: whoever starts before a request arrived at most its bound after it."""
    core = make_core(max_num_seqs=1, chunk=64, aging_ms=aging_ms, srpf_weight=400, prefix_cache=False)
    driver = Driver.of(core)
    arrivals = list(itertools.accumulate(gap for _, gap in works))
    for index, (length, _) in enumerate(works):
        driver.add(make_spec(f"r{index}", prompt(length), max_tokens=1, arrival=arrivals[index]))
    driver.drain()
    started = [int(chunk.request_id[1:]) for step in driver.steps for chunk in step.chunks if chunk.start == 0]
    for place, index in enumerate(started):
        bound = min(aging_ms, 400 * works[index][0]) / 1000
        assert all(arrivals[earlier] <= arrivals[index] + bound for earlier in started[:place])


def test_a_request_whose_prefix_was_evicted_goes_back_to_where_it_belongs() -> None:
    core = make_core(num_blocks=16, max_num_seqs=4, chunk=64, srpf_weight=1)
    driver = Driver.of(core)
    driver.add(make_spec("warm-up", prompt(40), max_tokens=1))
    driver.drain()
    driver.add(make_spec("hog", prompt(60, 1), max_tokens=1, arrival=0))  # takes blocks of the cached prefix
    driver.add(make_spec("was warm", [*prompt(40), 6], max_tokens=1, arrival=1))
    driver.add(make_spec("other", prompt(20, 2), max_tokens=1, arrival=1.01))
    driver.drain()
    order = [chunk.request_id for step in driver.steps for chunk in step.chunks if chunk.samples]
    assert order == ["warm-up", "hog", "other", "was warm"]
