"""A request's life at the core's surface: refusals, aborts, errors, what comes out and what is counted."""

from __future__ import annotations

import pytest

from headstart.core.errors import DuplicateRequest, EmptyPrompt, QueueFull, RequestTooLong
from headstart.core.events import StepRetired
from headstart.core.request import FinishReason
from headstart.core.step import ModelOutput, TokenLogprob
from tests.core.harness import Driver, make_core, make_spec, prompt


def test_max_tokens_of_zero_computes_the_prompt_and_samples_nothing() -> None:
    driver = Driver.of(make_core(chunk=8, mixed=8, max_num_seqs=4))
    driver.add(make_spec("a", prompt(20), max_tokens=0))
    driver.drain()
    assert driver.finished["a"].finish_reason is FinishReason.LENGTH
    assert driver.outputs["a"] == []
    assert not any(chunk.samples for step in driver.steps for chunk in step.chunks)


def test_prompt_logprobs_are_computed_in_full_and_reported_once() -> None:
    core = make_core(num_blocks=6, chunk=9, mixed=8, max_num_seqs=4)
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
        core = make_core(max_num_seqs=2, chunk=8, mixed=4)
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
    core = make_core(chunk=40, mixed=20, max_num_seqs=8)
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


def test_stats_count_how_predictions_of_steps_turned_out() -> None:
    driver = Driver.of(make_core())
    driver.add(make_spec("a", prompt(16), max_tokens=4))
    driver.drain()
    retired = [event for event in driver.core.take_events() if isinstance(event, StepRetired)]
    ratios = [event.predicted_seconds / event.seconds for event in retired if event.num_scheduled_tokens]
    stats = driver.core.stats()
    assert sum(stats.step_ratios) == len(ratios) == 4
    assert stats.step_ratios_sum == pytest.approx(sum(ratios))


def test_a_prefill_beside_decodes_has_its_share_of_all_the_work() -> None:
    core = make_core(chunk=40, mixed=20, max_num_seqs=8, attention_horizon=10)
    driver = Driver.of(core)
    driver.add(make_spec("a", prompt(8)))
    driver.step()
    driver.add(make_spec("b", prompt(4, 1), arrival=1))
    driver.step()
    retired = [event for event in core.take_events() if isinstance(event, StepRetired)]
    decode, prefill = 1 + (8 + 0.5) / 10, 4 + (4 * 4 / 2) / 10
    assert retired[-1].shares == (("b", pytest.approx(prefill / (prefill + decode))),)


def test_blocks_of_an_answer_are_shared_while_it_is_still_being_written() -> None:
    driver = Driver.of(make_core(block_size=4))
    driver.add(make_spec("writer", prompt(3), max_tokens=30))
    while len(driver.outputs["writer"]) < 10:
        driver.step()
    known = [*prompt(3), *driver.outputs["writer"]]
    driver.add(make_spec("reader", [*known[:12], 0], max_tokens=1))
    while "reader" not in driver.finished:
        driver.step()
    assert "writer" not in driver.finished
    assert driver.finished["reader"].num_cached_tokens == 12
