"""When a newcomer would have its first token, and what is promised and refused for it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.config import SchedulerConfig
from headstart.core.cost import LinearCosts, StepWork
from headstart.core.errors import RequestTooLong, SloMiss
from headstart.core.forecast import Line, Margin, forecast
from tests.core.harness import Driver, make_core, make_spec, prompt

COSTS = LinearCosts(step=0.01, prefill_token=1e-3, decode=0.005)
CONFIG = SchedulerConfig(slo_tpot_ms=50, max_chunk_ms=200, max_num_seqs=8)


def line(**changes: object) -> Line:
    idle = {
        "step_left": 0.0,
        "decodes": StepWork(),
        "tokens_left": (),
        "usual_tokens": 100.0,
        "ahead": 0,
        "seconds_ahead": 0.0,
        "seats": 8,
    }
    return Line(**(idle | changes))  # type: ignore[arg-type]


def seconds(tokens: int = 100, **changes: object) -> float:
    return forecast(CONFIG, COSTS, line(**changes), block_size=4, cached=0, tokens=tokens).seconds


def test_an_idle_engine_takes_its_steps() -> None:
    assert seconds(100) == pytest.approx(0.1 + 0.01)
    assert seconds(1000) == pytest.approx(1.0 + 6 * 0.01), "six steps of 200 ms, less what a step costs itself"


def test_what_is_in_flight_and_ahead_comes_first() -> None:
    assert seconds(100, step_left=0.07) == pytest.approx(0.11 + 0.07)
    found = forecast(CONFIG, COSTS, line(ahead=1, seconds_ahead=0.3), block_size=4, cached=0, tokens=100)
    assert found.queue_seconds == pytest.approx(0.3 + 2 * 0.01)
    assert found.compute_seconds == pytest.approx(0.11)


def test_running_decodes_leave_prefill_the_rest_of_each_step() -> None:
    decodes = StepWork(num_decodes=4, decode_context=400, num_samples=4)
    assert seconds(100, decodes=decodes) == pytest.approx(0.1 + 5 * 0.03), "20 of 50 ms a step are for prefill"


def test_without_a_seat_it_waits_for_answers_to_end() -> None:
    decodes = StepWork(num_decodes=8, num_samples=8)
    free = seconds(100, decodes=decodes)
    full = {"decodes": decodes, "tokens_left": [9.0, 3.0] * 4, "seats": 0}
    assert seconds(100, **full) == pytest.approx(free + 3 * 0.05)
    assert seconds(100, **full, ahead=8) > seconds(100, **full) + 100 * 0.05, "as many again as are running"


def test_who_loads_its_prefix_goes_before_it_once_that_is_there() -> None:
    alone = seconds(100)
    assert seconds(100, loading=[(0.05, 0.03)]) == pytest.approx(alone + 0.03 + 0.01)
    assert seconds(100, loading=[(alone, 0.03)]) == alone, "the newcomer is through before the load is"
    both = seconds(100, ahead=2, seconds_ahead=0.06)
    assert seconds(100, loading=[(alone + 0.01, 0.03), (0.05, 0.03)]) == both, "the one delays it until the other"
    full = {"loading": [(0.05, 0.03)], "decodes": StepWork(num_decodes=1, num_samples=1), "tokens_left": [9.0]}
    assert seconds(100, **full, seats=1) == seconds(100, **full, seats=2), "it has its seat"
    assert seconds(100, **full, seats=0) > seconds(100, **full, seats=1)


@given(st.integers(0, 1 << 32), st.floats(0.3, 1.5), st.floats(0.0, 1.0))
def test_the_margin_covers_most_of_what_comes(seed: int, least: float, spread: float) -> None:
    rng = random.Random(seed)
    margin, exceeded = Margin(), 0
    for _ in range(400):
        predicted = rng.uniform(0.01, 10)
        real = predicted * (least + spread * rng.random())
        exceeded += real > predicted * margin.factor
        margin.learn(predicted, real)
        assert 1 <= margin.factor <= 3
    assert exceeded <= 0.1 * 400 + 50, "a tenth, and what it learned from"


def test_the_prediction_comes_with_the_first_token() -> None:
    driver = Driver.of(make_core(chunk=64, max_num_seqs=4))
    driver.add(make_spec("a", prompt(20), max_tokens=3))
    news = []
    for _ in range(2):
        step = driver.core.begin_step(driver.now)
        assert step is not None
        driver.now += 1.02
        news += driver.core.finish_step(driver.worker.execute(step), driver.now)
    assert [output.predicted_ttft for output in news] == [pytest.approx(1.02), 0]


def test_an_estimate_counts_what_is_cached_and_refuses_what_can_never_run() -> None:
    driver = Driver.of(make_core(chunk=64, max_num_seqs=4))
    driver.add(make_spec("a", prompt(40), max_tokens=1))
    driver.drain()
    found = driver.core.estimate(make_spec("b", [*prompt(40), 6]), driver.now)
    assert found.num_cached_tokens == 40
    assert found.prefill_seconds == pytest.approx(1e-3)
    assert found.seconds == pytest.approx(1 + 1e-3)
    with pytest.raises(RequestTooLong):
        driver.core.estimate(make_spec("c", prompt(500)), driver.now)


def test_a_running_step_is_waited_for() -> None:
    driver = Driver.of(make_core(chunk=256, max_num_seqs=4, pipeline_depth=2))
    driver.add(make_spec("long", prompt(200), max_tokens=1))
    assert driver.core.begin_step(0.0) is not None
    assert driver.core.estimate(make_spec("b", prompt(10, 1)), 0.5).queue_seconds == pytest.approx(0.7)
    assert driver.core.estimate(make_spec("b", prompt(10, 1)), 9.0).queue_seconds == 0, "it takes longer than thought"


class TestReject:
    def start(self, **settings: object) -> Driver:
        return Driver.of(make_core(chunk=32, mixed=32, max_num_seqs=4, on_slo_miss="reject", **settings))

    def test_an_slo_that_cannot_be_kept_is_refused_with_the_numbers(self) -> None:
        driver = self.start()
        before = driver.core.stats()
        with pytest.raises(SloMiss, match=r"predicted after 4,100 ms, but is due after 3,000 ms; try again in 1\.1 s"):
            driver.add(make_spec("a", prompt(100), slo_ttft=3.0))
        assert driver.core.stats() == before
        driver.add(make_spec("b", prompt(100), slo_ttft=4.5))
        driver.drain()

    def test_time_that_has_passed_since_the_arrival_counts(self) -> None:
        driver = self.start()
        driver.now = 2.0
        with pytest.raises(SloMiss):
            driver.add(make_spec("a", prompt(20), arrival=0.0, slo_ttft=3.0))

    def test_without_an_slo_nothing_is_refused(self) -> None:
        driver = self.start()
        for index in range(9):
            driver.add(make_spec(f"r{index}", prompt(60, index)))
        driver.drain()

    def test_a_newcomer_who_would_break_anothers_promise_is_refused(self) -> None:
        driver = self.start()
        driver.add(make_spec("long", prompt(64), slo_ttft=3.5))  # predicted for 2.06
        driver.add(make_spec("short", prompt(16, 1), slo_ttft=9.0))  # goes first, and puts it off by 1.02
        with pytest.raises(SloMiss):
            driver.add(make_spec("too much", prompt(16, 2), slo_ttft=9.0))
        driver.add(make_spec("longer", prompt(90, 3), slo_ttft=99.0))  # goes behind them
        driver.drain()

    def test_a_half_done_prefill_keeps_its_promise_too(self) -> None:
        driver = self.start()
        driver.add(make_spec("long", prompt(64), slo_ttft=2.5))
        driver.step()
        with pytest.raises(SloMiss):
            driver.add(make_spec("short", prompt(16, 1), arrival=0.0, slo_ttft=9.0))

    def test_where_misses_queue_everybody_is_let_in(self) -> None:
        driver = Driver.of(make_core(chunk=32, mixed=32, max_num_seqs=4))
        driver.add(make_spec("a", prompt(100), slo_ttft=0.1))
        driver.drain()
        assert driver.finished["a"].error is None


def test_half_done_prefills_ahead_have_their_seats() -> None:
    """What they take is their prefill; no answer has to end for them."""
    driver = Driver.of(make_core(num_blocks=128, chunk=64, mixed=64, max_num_seqs=3))
    driver.add(make_spec("one", prompt(60), max_tokens=50))
    driver.step()
    driver.add(make_spec("two", prompt(100, 1), max_tokens=50))
    driver.step()
    found = driver.core.estimate(make_spec("new", prompt(200, 2)), driver.now)
    assert found.num_ahead == 1
    assert found.queue_seconds < 3, "there is a seat"


@pytest.mark.parametrize(("slo", "first"), [(None, "early"), (2.0, "late")])
def test_edf_goes_by_when_the_first_token_is_due(slo: float | None, first: str) -> None:
    driver = Driver.of(make_core(policy="edf", slo_ttft_ms=10_000, chunk=8, mixed=8, max_num_seqs=4))
    driver.add(make_spec("early", prompt(8), arrival=0.0))
    driver.add(make_spec("late", prompt(8, 1), arrival=3.0, slo_ttft=slo))
    step = driver.step()
    assert step is not None
    assert step.chunks[0].request_id == first


def test_a_full_pool_is_waited_for() -> None:
    driver = Driver.of(make_core(num_blocks=16, chunk=64, max_num_seqs=4))
    driver.add(make_spec("hog", prompt(56), max_tokens=8))
    driver.step()
    found = driver.core.estimate(make_spec("b", prompt(30, 1)), driver.now)
    assert found.queue_seconds > 3
