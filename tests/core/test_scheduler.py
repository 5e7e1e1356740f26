"""What each rule and each knob of the scheduler does, shown on small schedules."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.errors import DuplicateRequest, EmptyPrompt, QueueFull, RequestTooLong
from headstart.core.events import RequestPreempted, StepRetired
from headstart.core.request import FinishReason
from headstart.core.step import ModelOutput, SchedulerOutput, TokenLogprob
from tests.core.harness import Driver, FakeWorker, expected_tokens, make_core, make_spec


def prompt(length: int, first: int = 0) -> list[int]:
    """Unlike for another `first`, from the first token on."""
    return [first, *(index % 5 for index in range(length - 1))]


def lengths(step: SchedulerOutput | None) -> dict[str, int]:
    assert step is not None
    return {chunk.request_id: chunk.num_scheduled_tokens for chunk in step.chunks}


def test_a_step_mixes_decodes_and_a_prefill_chunk() -> None:
    driver = Driver.of(make_core(max_num_batched_tokens=32, mixed_step_tokens=8, max_num_seqs=8))
    driver.add(make_spec("chat", prompt(5), max_tokens=20))
    driver.step()
    driver.add(make_spec("long", prompt(60, 1)))
    assert lengths(driver.step()) == {"chat": 1, "long": 8}
    assert lengths(driver.step()) == {"chat": 1, "long": 8}


def test_without_decodes_the_whole_budget_goes_to_prefills() -> None:
    driver = Driver.of(make_core(max_num_batched_tokens=32, mixed_step_tokens=8, max_num_seqs=8))
    driver.add(make_spec("a", prompt(20)))
    driver.add(make_spec("b", prompt(20, 1), arrival=1))
    assert lengths(driver.step()) == {"a": 20, "b": 12}


def test_a_short_prompt_passes_a_half_done_long_one_which_keeps_its_blocks() -> None:
    driver = Driver.of(
        make_core(max_num_batched_tokens=16, mixed_step_tokens=16, max_num_seqs=8, srpf_ms_per_token=1000)
    )
    driver.add(make_spec("long", prompt(100)))
    driver.step()
    driver.add(make_spec("short", prompt(16, 1), arrival=driver.now))
    assert lengths(driver.step()) == {"short": 16}
    step = driver.step()
    assert lengths(step) == {"short": 1, "long": 12}, "the decode takes one of sixteen rows"
    assert step is not None
    assert step.chunks[1].start == 16, "the long one goes on where it paused"


def test_fcfs_lets_nobody_pass() -> None:
    driver = Driver.of(make_core(policy="fcfs", max_num_batched_tokens=16, max_num_seqs=8, mixed_step_tokens=16))
    driver.add(make_spec("long", prompt(40)))
    driver.step()
    driver.add(make_spec("short", prompt(4, 1), arrival=driver.now))
    assert lengths(driver.step()) == {"long": 16}


@pytest.mark.parametrize(("aging_ms", "first"), [(2_000, "long"), (60_000, "short")])
def test_aging_bounds_how_long_a_request_is_passed(aging_ms: int, first: str) -> None:
    driver = Driver.of(
        make_core(
            max_num_batched_tokens=8, mixed_step_tokens=8, max_num_seqs=4, aging_ms=aging_ms, srpf_ms_per_token=1000
        )
    )
    driver.add(make_spec("long", prompt(50), arrival=0))
    driver.add(make_spec("short", prompt(4, 1), arrival=3))
    assert next(iter(lengths(driver.step()))) == first


@pytest.mark.parametrize(("per_token", "first"), [(0, "long"), (100, "short")])
def test_srpf_ms_per_token_is_what_a_shorter_prompt_is_worth(per_token: int, first: str) -> None:
    driver = Driver.of(
        make_core(max_num_batched_tokens=8, mixed_step_tokens=8, max_num_seqs=4, srpf_ms_per_token=per_token)
    )
    driver.add(make_spec("long", prompt(50), arrival=0))
    driver.add(make_spec("short", prompt(4, 1), arrival=1))
    assert next(iter(lengths(driver.step()))) == first


@pytest.mark.parametrize(("step_ms", "first"), [(60_000, "vip"), (500, "early")])
def test_a_level_of_priority_is_worth_priority_step_ms(step_ms: int, first: str) -> None:
    driver = Driver.of(
        make_core(
            policy="fcfs", max_num_batched_tokens=8, mixed_step_tokens=8, max_num_seqs=4, priority_step_ms=step_ms
        )
    )
    driver.add(make_spec("early", prompt(8), arrival=0))
    driver.add(make_spec("vip", prompt(8, 1), arrival=1, priority=-1))
    assert next(iter(lengths(driver.step()))) == first


def test_srpf_counts_uncached_tokens_only() -> None:
    driver = Driver.of(
        make_core(max_num_batched_tokens=64, mixed_step_tokens=64, max_num_seqs=4, srpf_ms_per_token=1000)
    )
    driver.add(make_spec("warm-up", prompt(40), max_tokens=1))
    driver.drain()
    driver.add(make_spec("cold", prompt(20, 1), arrival=driver.now))
    driver.add(make_spec("warm", [*prompt(40), 6], arrival=driver.now))
    step = driver.step()
    assert next(iter(lengths(step).items())) == ("warm", 1)


def test_a_waiting_request_moves_up_when_its_prefix_becomes_cached() -> None:
    core = make_core(max_num_batched_tokens=48, mixed_step_tokens=48, max_num_seqs=1, srpf_ms_per_token=1000)
    driver = Driver.of(core)
    driver.add(make_spec("first", prompt(40), max_tokens=2))
    driver.step()
    driver.add(make_spec("cold", prompt(20, 1), arrival=driver.now))
    driver.add(make_spec("follow", [*prompt(40), 6], arrival=driver.now))
    driver.step()  # "first" ends; only one may run at once
    assert lengths(driver.step()) == {"follow": 1}


def test_max_num_seqs_bounds_who_holds_blocks() -> None:
    driver = Driver.of(make_core(max_num_seqs=2, max_num_batched_tokens=100))
    for index in range(4):
        driver.add(make_spec(f"r{index}", prompt(4, index)))
    driver.step()
    assert (driver.core.stats().num_running, driver.core.stats().num_waiting) == (2, 2)
    driver.drain()


def test_the_horizon_shrinks_chunks_as_the_context_grows() -> None:
    driver = Driver.of(
        make_core(
            num_blocks=512,
            block_size=1,
            max_num_batched_tokens=64,
            mixed_step_tokens=64,
            max_num_seqs=4,
            attention_horizon=64,
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
        make_core(block_size=16, num_blocks=8, max_num_batched_tokens=40, mixed_step_tokens=40, max_num_seqs=4),
        block_size=16,
    )
    driver.add(make_spec("long", prompt(100), max_tokens=1))
    driver.drain()
    assert [step.chunks[0].num_scheduled_tokens for step in driver.steps if step.chunks] == [32, 32, 36]


def test_the_last_prompt_token_is_always_computed() -> None:
    driver = Driver.of(make_core())
    driver.add(make_spec("a", prompt(16), max_tokens=2))
    driver.drain()
    driver.add(make_spec("b", prompt(16), max_tokens=2))
    step = driver.step()
    assert step is not None
    assert (step.chunks[0].start, step.chunks[0].num_scheduled_tokens) == (12, 4)
    driver.drain()
    assert driver.outputs["a"] == driver.outputs["b"]
    assert driver.finished["b"].num_cached_tokens == 12


def test_generated_blocks_are_cached_too() -> None:
    driver = Driver.of(make_core())
    driver.add(make_spec("a", prompt(10), max_tokens=11))
    driver.drain()
    driver.add(make_spec("b", [*prompt(10), *driver.outputs["a"], 3], max_tokens=2))
    driver.drain()
    assert driver.finished["b"].num_cached_tokens == 20


def test_a_salt_isolates_the_cache() -> None:
    driver = Driver.of(make_core())
    driver.add(make_spec("a", prompt(16), salt="one"))
    driver.drain()
    driver.add(make_spec("b", prompt(16), salt="two"))
    driver.add(make_spec("c", prompt(16), salt="one"))
    driver.drain()
    assert driver.finished["b"].num_cached_tokens == 0
    assert driver.finished["c"].num_cached_tokens == 12


def test_without_prefix_cache_nothing_is_reused() -> None:
    driver = Driver.of(make_core(prefix_cache=False))
    for name in "ab":
        driver.add(make_spec(name, prompt(16)))
        driver.drain()
    assert driver.finished["b"].num_cached_tokens == 0
    assert driver.core.stats().num_cached_blocks == 0


def test_two_computing_the_same_prefix_share_it_afterwards() -> None:
    core = make_core(max_num_batched_tokens=64, max_num_seqs=4)
    driver = Driver.of(core)
    for name in "ab":
        driver.add(make_spec(name, prompt(16), max_tokens=8))
    driver.step()
    before = core.stats().num_free_blocks
    driver.step()
    # Four blocks of the prompt stand once; each request has a block of its own for its answer.
    assert (before, core.stats().num_free_blocks) == (60, 58)
    driver.drain()
    assert driver.outputs["a"] == driver.outputs["b"]


def test_preemption_takes_the_last_comer_and_loses_no_token() -> None:
    core = make_core(num_blocks=8, max_num_seqs=4, max_num_batched_tokens=64)
    driver = Driver.of(core)
    specs = [make_spec(f"r{index}", prompt(8, index), max_tokens=16, arrival=index) for index in range(3)]
    for spec in specs:
        driver.add(spec)
    events = []
    while core.has_work:
        assert driver.step() is not None
        events += core.take_events()
    preempted = [event.request_id for event in events if isinstance(event, RequestPreempted)]
    assert preempted
    assert "r0" not in preempted
    assert core.stats().preemptions == len(preempted)
    for spec in specs:
        assert driver.outputs[spec.request_id] == expected_tokens(spec, vocab_size=7, max_model_len=32)[0]
    assert driver.finished[preempted[0]].num_preemptions >= 1


def test_a_newcomer_leaves_a_block_for_each_running_request() -> None:
    core = make_core(num_blocks=8, max_num_seqs=4, max_num_batched_tokens=64)
    driver = Driver.of(core)
    driver.add(make_spec("a", prompt(16), max_tokens=12))
    driver.step()
    driver.add(make_spec("b", prompt(16, 1), max_tokens=2))
    driver.step()
    assert core.stats().num_running == 1, "four blocks would fit the prompt, but leave none for the next decode"
    driver.drain()
    assert core.stats().preemptions == 0


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
        driver = Driver.of(make_core(num_blocks=24, max_num_seqs=6, max_num_batched_tokens=64, pipeline_depth=depth))
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


def test_max_tokens_of_zero_computes_the_prompt_and_samples_nothing() -> None:
    driver = Driver.of(make_core(max_num_batched_tokens=8, mixed_step_tokens=8, max_num_seqs=4))
    driver.add(make_spec("a", prompt(20), max_tokens=0))
    driver.drain()
    assert driver.finished["a"].finish_reason is FinishReason.LENGTH
    assert driver.outputs["a"] == []
    assert not any(chunk.samples for step in driver.steps for chunk in step.chunks)


def test_prompt_logprobs_are_computed_in_full_and_reported_once() -> None:
    core = make_core(num_blocks=6, max_num_batched_tokens=9, mixed_step_tokens=8, max_num_seqs=4)
    driver = Driver.of(core)
    driver.add(make_spec("early", prompt(8), max_tokens=14, arrival=0))
    driver.step()
    driver.add(make_spec("echo", prompt(8, 1), max_tokens=6, arrival=1, prompt_logprobs=1))
    reported: list[int] = []
    while core.has_work:
        step = core.begin_step(driver.now)
        assert step is not None
        output = driver.worker.execute(step)
        chunks = tuple(
            result._replace(
                prompt_logprobs=tuple(
                    TokenLogprob(position, -1.0, 1)
                    for position in range(chunk.start + 1, min(chunk.start + chunk.num_scheduled_tokens + 1, 8))
                ),
            )
            if result.request_id == "echo"
            else result
            for result, chunk in zip(output.chunks, step.chunks, strict=True)
        )
        driver.now += 1
        news = core.finish_step(ModelOutput(output.step_id, chunks), driver.now)
        reported += [entry.token_id for item in news for entry in item.prompt_logprobs]
        driver.take(news)
    assert driver.finished["echo"].num_preemptions > 0, "the case is about recomputation"
    assert driver.finished["echo"].num_cached_tokens == 0
    assert reported == list(range(1, 8))


class TestRefusals:
    def test_a_prompt_beyond_the_context_names_both_numbers(self) -> None:
        core = make_core(num_blocks=8, max_model_len=20)
        with pytest.raises(RequestTooLong, match=r"20 tokens.*holds 20.*32 tokens") as caught:
            core.add_request(make_spec("a", prompt(20)), 0)
        assert (caught.value.num_prompt_tokens, caught.value.max_model_len, caught.value.num_pool_tokens) == (
            20,
            20,
            32,
        )
        core.add_request(make_spec("a", prompt(20), max_tokens=0), 0)

    def test_a_full_queue_names_the_limit(self) -> None:
        core = make_core(max_num_waiting=1)
        core.add_request(make_spec("a", prompt(4)), 0)
        with pytest.raises(QueueFull, match="limit is 1") as caught:
            core.add_request(make_spec("b", prompt(4)), 0)
        assert (caught.value.num_waiting, caught.value.limit) == (1, 1)

    def test_an_id_in_use(self) -> None:
        core = make_core()
        core.add_request(make_spec("a", prompt(4)), 0)
        with pytest.raises(DuplicateRequest, match="'a'"):
            core.add_request(make_spec("a", prompt(4)), 0)

    def test_an_empty_prompt(self) -> None:
        with pytest.raises(EmptyPrompt):
            make_core().add_request(make_spec("a", []), 0)

    def test_a_context_that_the_pool_cannot_hold(self) -> None:
        with pytest.raises(ValueError, match="100 tokens does not fit the KV pool of 32"):
            make_core(num_blocks=8, max_model_len=100)


class TestAborts:
    def test_in_every_state(self) -> None:
        core = make_core(max_num_seqs=2, max_num_batched_tokens=8, mixed_step_tokens=4)
        driver = Driver.of(core)
        for index, name in enumerate(["decoding", "half-done", "waiting"]):
            driver.add(make_spec(name, prompt(4 if not index else 40, index), arrival=index, max_tokens=50))
        driver.step()
        driver.step()
        assert core.stats().num_running == 2
        for name in ["waiting", "half-done", "decoding", "never existed"]:
            core.abort(name, driver.now)
        driver.take(core.take_outputs())
        assert {output.finish_reason for output in driver.finished.values()} == {FinishReason.ABORT}
        assert core.stats().num_free_blocks == core.stats().num_blocks
        step = driver.step()
        assert step is not None
        assert step.chunks == ()
        assert len(step.finished_request_ids) == 2
        assert not core.has_work
        assert core.stats().aborts == 3

    def test_news_of_an_abort_come_with_the_next_step_too(self) -> None:
        driver = Driver.of(make_core())
        driver.add(make_spec("a", prompt(4)))
        driver.add(make_spec("b", prompt(4)))
        driver.core.abort("a", 0)
        driver.step()
        assert driver.finished["a"].finish_reason is FinishReason.ABORT


def test_an_error_of_one_request_harms_no_other() -> None:
    driver = Driver.of(make_core())
    for name in "ab":
        driver.add(make_spec(name, prompt(9)))
    driver.worker.failing.add("a")
    driver.drain()
    assert (driver.finished["a"].finish_reason, driver.finished["a"].error) == (FinishReason.ERROR, "non-finite logits")
    assert driver.finished["b"].finish_reason is FinishReason.LENGTH


def test_events_tell_each_step_with_shares_of_those_without_a_token() -> None:
    core = make_core(max_num_batched_tokens=40, mixed_step_tokens=20, max_num_seqs=8)
    driver = Driver.of(core)
    driver.add(make_spec("a", prompt(10)))
    driver.add(make_spec("b", prompt(30, 1), arrival=1))
    driver.step()
    driver.step()
    retired = [event for event in core.take_events() if isinstance(event, StepRetired)]
    assert retired[0].shares == (("a", 0.25), ("b", 0.75))
    assert retired[1].shares == ()
    assert [event.num_scheduled_tokens for event in retired] == [40, 2]


def test_stats_count_tokens_by_kind() -> None:
    driver = Driver.of(make_core())
    for name in "ab":
        driver.add(make_spec(name, prompt(16), max_tokens=4))
        driver.drain()
    stats = driver.core.stats()
    assert (stats.prompt_tokens_computed, stats.prompt_tokens_cached, stats.generated_tokens) == (20, 12, 8)
    assert stats.finished == 2


@given(
    works=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20)), min_size=2, max_size=12),
    aging_ms=st.integers(0, 10_000),
)
def test_nobody_is_passed_by_those_who_arrive_beyond_the_bound(works: list[tuple[int, int]], aging_ms: int) -> None:
    """Starting one at a time: whoever starts before a request arrived at most its bound after it."""
    core = make_core(
        max_num_seqs=1, max_num_batched_tokens=64, aging_ms=aging_ms, srpf_ms_per_token=400, prefix_cache=False
    )
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
    core = make_core(num_blocks=16, max_num_seqs=4, max_num_batched_tokens=64, srpf_ms_per_token=1)
    driver = Driver.of(core)
    driver.add(make_spec("warm-up", prompt(40), max_tokens=1))
    driver.drain()
    driver.add(make_spec("hog", prompt(60, 1), max_tokens=1, arrival=0))  # takes blocks of the cached prefix
    driver.add(make_spec("was warm", [*prompt(40), 6], max_tokens=1, arrival=1))
    driver.add(make_spec("other", prompt(20, 2), max_tokens=1, arrival=1.01))
    driver.drain()
    order = [chunk.request_id for step in driver.steps for chunk in step.chunks if chunk.samples]
    assert order == ["warm-up", "hog", "other", "was warm"]
