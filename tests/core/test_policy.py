"""Who goes first: what each policy and each of its knobs does, shown on small schedules."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.config import SchedulerConfig
from headstart.core.cost import LinearCosts
from headstart.core.engine_core import EngineCore
from tests.core.harness import Driver, FakeWorker, lengths, make_core, make_spec, prompt

TOKEN_SECONDS, CHUNK_SECONDS = 0.01, 0.1


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
    works=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 300)), min_size=2, max_size=24),
    weight=st.floats(0, 50),
    aging_ms=st.integers(0, 3_000),
    factor=st.floats(0, 8),
)
def test_nobody_waits_longer_past_its_turn_than_the_bound(
    works: list[tuple[float, int]], weight: float, aging_ms: int, factor: float
) -> None:
    """Whatever arrives when: against first come, first served, on the same predicted times."""
    config = SchedulerConfig(
        max_chunk_ms=CHUNK_SECONDS * 1000, srpf_weight=weight, aging_ms=aging_ms, aging_factor=factor
    )
    costs = LinearCosts(prefill_token=TOKEN_SECONDS)
    core = EngineCore(config, costs, num_blocks=8000, block_size=1, max_model_len=400, prefix_cache=False)
    done = first_tokens(core, works)
    arrival = turn_over = 0.0
    for index, (gap, length) in enumerate(works):
        arrival += gap
        seconds = length * TOKEN_SECONDS
        turn_over = max(turn_over, arrival) + seconds
        bound = min(weight * seconds, max(aging_ms / 1000, factor * seconds))
        # Whoever arrives waits for the step in flight, once to be seen and once to be served.
        assert done[f"r{index}"] <= turn_over + bound + 2 * CHUNK_SECONDS + 1e-6


def first_tokens(core: EngineCore, works: list[tuple[float, int]]) -> dict[str, float]:
    """When each request has its token, on a clock that moves by what the steps cost."""
    done: dict[str, float] = {}
    worker = FakeWorker(block_size=1)
    arrivals = list(itertools.accumulate(gap for gap, _ in works))
    now, num_added = 0.0, 0
    while len(done) < len(works):
        while num_added < len(works) and arrivals[num_added] <= now:
            spec = make_spec(f"r{num_added}", prompt(works[num_added][1]), max_tokens=1, arrival=arrivals[num_added])
            core.add_request(spec, now)
            num_added += 1
        step = core.begin_step(now)
        if step is None or not step.chunks:
            now = arrivals[num_added] if step is None else now
        else:
            now += sum(chunk.num_scheduled_tokens for chunk in step.chunks) * TOKEN_SECONDS
        if step is not None:
            done |= {output.request_id: now for output in core.finish_step(worker.execute(step), now)}
    return done


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
