"""What a step holds, and what more steps in flight demand, shown on small schedules."""

from __future__ import annotations

import pytest

from headstart.core.events import RequestPreempted
from headstart.core.request import FinishReason
from tests.core.harness import Driver, FakeWorker, lengths, make_core, make_spec, prompt


def test_a_step_mixes_decodes_and_a_prefill_chunk() -> None:
    driver = Driver.of(make_core(chunk=32, mixed=8, max_num_seqs=8))
    driver.add(make_spec("chat", prompt(5), max_tokens=20))
    driver.step()
    driver.add(make_spec("long", prompt(60, 1)))
    assert lengths(driver.step()) == {"chat": 1, "long": 8}
    assert lengths(driver.step()) == {"chat": 1, "long": 8}


def test_without_decodes_the_whole_budget_goes_to_prefills() -> None:
    driver = Driver.of(make_core(chunk=32, mixed=8, max_num_seqs=8))
    driver.add(make_spec("a", prompt(20)))
    driver.add(make_spec("b", prompt(20, 1), arrival=1))
    assert lengths(driver.step()) == {"a": 20, "b": 12}


def test_max_num_seqs_bounds_who_holds_blocks() -> None:
    driver = Driver.of(make_core(max_num_seqs=2, chunk=100))
    for index in range(4):
        driver.add(make_spec(f"r{index}", prompt(4, index)))
    driver.step()
    assert (driver.core.stats().num_running, driver.core.stats().num_waiting) == (2, 2)
    driver.drain()


def test_chunks_shrink_as_the_context_grows() -> None:
    driver = Driver.of(
        make_core(
            num_blocks=512,
            block_size=1,
            chunk=64,
            mixed=64,
            max_num_seqs=4,
            context_ms=1 / 64,
        ),
        block_size=1,
    )
    driver.add(make_spec("long", prompt(400), max_tokens=1))
    driver.drain()
    chunks = [step.chunks[0].num_scheduled_tokens for step in driver.steps if step.chunks][:-1]
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[0] > 3 * chunks[-1] > 0


def test_chunks_that_do_not_finish_end_on_a_block_border() -> None:
    driver = Driver.of(
        make_core(block_size=16, num_blocks=8, chunk=40, mixed=40, max_num_seqs=4),
        block_size=16,
    )
    driver.add(make_spec("long", prompt(100), max_tokens=1))
    driver.drain()
    assert [step.chunks[0].num_scheduled_tokens for step in driver.steps if step.chunks] == [32, 32, 36]


class TestDepthTwo:
    def start(self, **settings: object) -> tuple[Driver, FakeWorker]:
        driver = Driver.of(make_core(pipeline_depth=2, **settings))
        return driver, driver.worker

    def test_scheduling_runs_one_step_ahead(self) -> None:
        driver, _worker = self.start()
        driver.add(make_spec("a", prompt(6), max_tokens=5))
        first, second = driver.core.begin_step(0), driver.core.begin_step(0)
        assert lengths(first) == {"a": 6}
        assert lengths(second) == {"a": 1}
        assert driver.core.begin_step(0) is None, "two are in flight"
        assert second is not None
        assert second.chunks[0].start == 6, "the token it computes is not known yet"

    def test_the_token_after_an_end_of_sequence_is_dropped_and_blocks_return_late(self) -> None:
        driver, worker = self.start(num_blocks=16)
        spec = make_spec("a", prompt(6), max_tokens=9, stop=tuple(range(7)))  # any token ends it
        driver.add(spec)
        results = [worker.execute(step) for step in (driver.core.begin_step(0), driver.core.begin_step(0)) if step]
        driver.take(driver.core.finish_step(results[0], 1))
        assert driver.finished["a"].finish_reason is FinishReason.STOP
        assert driver.outputs["a"] == []
        assert driver.core.stats().num_free_blocks == 14, "the second step still names its blocks"
        driver.take(driver.core.finish_step(results[1], 2))
        assert driver.core.stats().num_free_blocks == 16
        driver.drain()
        assert driver.finished["a"].stop_token_id is not None

    @pytest.mark.parametrize("depth", [1, 2])
    def test_one_missing_block_costs_one_request_its_place(self, depth: int) -> None:
        """The victim's blocks come free only when the steps in flight retire: nobody else has to go meanwhile."""
        driver = Driver.of(make_core(num_blocks=24, max_num_seqs=6, chunk=64, pipeline_depth=depth))
        for index in range(6):
            driver.add(make_spec(f"r{index}", prompt(8, index), max_tokens=24, arrival=index))
        results, most = [], 0
        while driver.core.has_work:
            step = driver.core.begin_step(driver.now)
            events = driver.core.take_events()
            most = max(most, sum(isinstance(event, RequestPreempted) for event in events))
            if step is not None:
                results.append(driver.worker.execute(step))
            if results and (step is None or len(results) == depth):
                driver.now += 1
                driver.take(driver.core.finish_step(results.pop(0), driver.now))
            driver.core.check_invariants()
        assert most <= 2, "two blocks at most are missing at once"
        assert 1 <= driver.core.stats().preemptions <= 8
        assert set(driver.finished) == {f"r{index}" for index in range(6)}

    def test_no_decode_is_granted_past_max_tokens(self) -> None:
        driver, _worker = self.start()
        driver.add(make_spec("a", prompt(6), max_tokens=1))
        assert driver.core.begin_step(0) is not None
        assert driver.core.begin_step(0) is None

    def test_no_decode_is_granted_past_the_context(self) -> None:
        driver, _worker = self.start(num_blocks=2)
        driver.add(make_spec("a", prompt(7), max_tokens=9))
        assert driver.core.begin_step(0) is not None
        assert driver.core.begin_step(0) is None
