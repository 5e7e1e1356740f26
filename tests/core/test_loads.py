"""KV from a tier: load or recompute, keeping pace, and what becomes of the blocks meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core import chain
from headstart.core.connector import KVArrival
from headstart.core.errors import SloMiss
from headstart.core.events import LoadBegan, LoadEnded
from headstart.core.request import FinishReason
from headstart.core.step import SchedulerOutput
from tests.core.fake_tier import FakeTier
from tests.core.harness import Driver, expected_tokens, make_core, make_spec, prompt

PROMPT = prompt(33)  # eight blocks of four tokens, and the last token


def evicted(tier: FakeTier, **scheduler: object) -> Driver:
    """A driver whose cache has lost `PROMPT`'s blocks to its tier: 16 blocks in all."""
    driver = Driver.of(make_core(num_blocks=16, tier=tier, **scheduler), tier=tier)
    driver.add(make_spec("first", PROMPT, max_tokens=1))
    driver.drain()
    driver.add(make_spec("flood", prompt(63, 1), max_tokens=1))
    driver.drain()
    return driver


def arrive(driver: Driver, tier: FakeTier, count: int | None = None, *, ended: bool = False) -> None:
    for load_id, names in list(tier.loads.items()):
        driver.core.kv_arrived(KVArrival(load_id, len(names) if count is None else count, ended))


def test_evicted_blocks_are_saved_under_their_names() -> None:
    tier = FakeTier(4)
    evicted(tier)
    assert set(chain.names("", PROMPT, 4, 8)) <= tier.stored.keys()


def test_a_prompt_is_loaded_instead_of_recomputed() -> None:
    tier = FakeTier(4)
    driver = evicted(tier)
    driver.add(make_spec("again", PROMPT, max_tokens=2))
    assert driver.core.begin_step(driver.now) is None, "nothing to compute until the blocks are there"
    assert driver.core.stats().num_loading == 1
    arrive(driver, tier)
    driver.drain()
    output = driver.finished["again"]
    assert output.num_cached_tokens == 32
    assert (
        driver.outputs["again"]
        == expected_tokens(make_spec("again", PROMPT, max_tokens=2), vocab_size=7, max_model_len=64)[0]
    )
    stats = driver.core.stats()
    assert (stats.loads, stats.loads_cut_short, stats.prompt_tokens_loaded) == (1, 0, 32)
    events = driver.core.take_events()
    assert [type(event) for event in events if isinstance(event, LoadBegan | LoadEnded)] == [LoadBegan, LoadEnded]


def test_what_is_quicker_to_recompute_is_recomputed() -> None:
    tier = FakeTier(4, seconds_per_block=0.0041)  # recomputing a block takes 0.004
    driver = evicted(tier)
    driver.add(make_spec("again", PROMPT, max_tokens=1))
    driver.drain()
    assert driver.finished["again"].num_cached_tokens == 0
    assert driver.core.stats().loads == 0


def test_who_would_hear_of_it_too_late_does_not_load() -> None:
    tier = FakeTier(4, seconds_to_news=0.002)  # 3 % of 33 ms are less
    driver = evicted(tier)
    driver.add(make_spec("again", PROMPT, max_tokens=1))
    driver.drain()
    assert driver.core.stats().loads == 0


def test_an_estimate_counts_the_load() -> None:
    tier = FakeTier(4, seconds_per_block=0.001)
    driver = evicted(tier)
    found = driver.core.estimate(make_spec("again", PROMPT), driver.now)
    assert found.num_cached_tokens == 32
    assert found.load_seconds == pytest.approx(0.008)
    assert found.seconds >= found.load_seconds + found.prefill_seconds


def loading(tier: FakeTier, *, slo: float | None = None, **scheduler: object) -> Driver:
    """A request loads four blocks, in 12 ms, and has 17 tokens to compute then."""
    driver = evicted(tier, **scheduler)
    for name in chain.names("", PROMPT, 4, 8)[4:]:
        del tier.stored[name]
    driver.add(make_spec("again", PROMPT, max_tokens=1, arrival=driver.now, slo_ttft=slo))
    assert driver.core.begin_step(driver.now) is None
    assert driver.core.stats().num_loading == 1
    return driver


def test_what_a_loading_request_has_left_to_compute_counts_for_those_behind_it() -> None:
    driver = loading(FakeTier(4, seconds_per_block=0.003))
    longer = driver.core.estimate(make_spec("longer", prompt(27, 2), arrival=driver.now), driver.now)
    assert longer.num_ahead == 1
    assert longer.queue_seconds == pytest.approx(1.017), "a step, and its 17 tokens"
    shorter = driver.core.estimate(make_spec("shorter", prompt(3, 3), arrival=driver.now), driver.now)
    assert (shorter.num_ahead, shorter.queue_seconds) == (0, 0)
    hardly = driver.core.estimate(make_spec("hardly shorter", prompt(16, 3), arrival=driver.now), driver.now)
    assert hardly.num_ahead == 1, "the other was there first: its turn is after that one's"
    full = loading(FakeTier(4, seconds_per_block=0.003), max_num_seqs=1)
    waits = full.core.estimate(make_spec("longer", prompt(27, 2), arrival=full.now), full.now)
    assert waits.queue_seconds > longer.queue_seconds + 0.5, "until the other's answer is at its end"


def test_a_newcomer_who_would_break_a_loading_requests_promise_is_refused() -> None:
    """Predicted for 1.029 s; a newcomer that goes first computes for 1.003 s, 0.991 s of them after the load."""
    for slo, fits in ((2.03, True), (2.01, False)):
        driver = loading(FakeTier(4, seconds_per_block=0.003), slo=slo, on_slo_miss="reject")
        newcomer = make_spec("newcomer", prompt(3, 3), max_tokens=1, arrival=driver.now, slo_ttft=9.0)
        if fits:
            driver.add(newcomer)
        else:
            with pytest.raises(SloMiss):
                driver.add(newcomer)


def test_a_load_that_ends_early_is_used_as_far_as_it_came() -> None:
    tier = FakeTier(4)
    driver = evicted(tier)
    driver.add(make_spec("again", PROMPT, max_tokens=1))
    driver.core.begin_step(driver.now)
    arrive(driver, tier, 3, ended=True)
    driver.drain()
    assert driver.finished["again"].num_cached_tokens == 12
    assert driver.core.stats().loads_cut_short == 1


@given(arrivals=st.lists(st.tuples(st.floats(0, 0.02), st.integers(0, 8)), max_size=12))
@settings(deadline=None)
def test_waiting_and_the_rest_take_little_longer_than_recomputing_all(arrivals: list[tuple[float, int]]) -> None:
    """Whenever whatever arrives: a block's worth of recomputing is 4 ms, all 33 tokens' is 33 ms."""
    tier = FakeTier(4)
    driver = evicted(tier)
    began = driver.now
    driver.add(make_spec("again", PROMPT, max_tokens=1))
    assert driver.core.begin_step(driver.now) is None
    moments = sorted(arrivals)
    while driver.core.stats().num_loading:
        check = driver.core.next_check()
        assert check is not None
        if moments and began + moments[0][0] < check:
            seconds, count = moments.pop(0)
            driver.now = max(driver.now, began + seconds)
            arrive(driver, tier, count)
        else:
            driver.now = check + 1e-9
        step = driver.core.begin_step(driver.now)
        if step is not None:
            waited = driver.now - began
            rest = step.num_scheduled_tokens * 0.001
            assert waited + rest <= 1.03 * 0.033 + 1e-6
            driver.now += 1
            driver.take(driver.core.finish_step(driver.worker.execute(step), driver.now))
    driver.drain()
    assert driver.finished["again"].finish_reason is FinishReason.LENGTH


def test_who_leaves_while_it_loads_frees_its_blocks() -> None:
    tier = FakeTier(4)
    driver = evicted(tier)
    driver.add(make_spec("again", PROMPT, max_tokens=1))
    driver.core.begin_step(driver.now)
    driver.core.abort("again", driver.now)
    assert not tier.loads
    driver.drain()
    assert driver.core.stats().num_free_blocks == 16


def test_news_of_a_load_that_is_over_are_ignored() -> None:
    tier = FakeTier(4)
    driver = evicted(tier)
    driver.core.kv_arrived(KVArrival(17, 1, True))
    make_core().kv_arrived(KVArrival(0, 1, True))
    assert make_core().next_check() is None
    assert make_core().cached_blocks() == []
    assert not driver.core.has_work


def test_the_same_prompt_twice_is_loaded_once() -> None:
    tier = FakeTier(4)
    driver = evicted(tier)
    driver.core._scheduler._pending._min_tokens = 4
    driver.add(make_spec("one", PROMPT, max_tokens=1))
    driver.add(make_spec("two", PROMPT, max_tokens=1))
    driver.core.begin_step(driver.now)
    assert len(tier.loads) == 1
    arrive(driver, tier)
    driver.drain()
    assert driver.core.stats().loads == 1
    assert driver.finished["two"].num_cached_tokens == 32


def test_a_salt_is_part_of_the_names() -> None:
    tier = FakeTier(4)
    driver = evicted(tier)
    driver.add(make_spec("other", PROMPT, max_tokens=1, salt="s"))
    driver.drain()
    assert driver.finished["other"].num_cached_tokens == 0


def test_what_no_step_has_filled_in_yet_is_not_kept_at_the_end() -> None:
    """Neither before the step that fills it in, nor while that is in flight: it may never run."""
    tier = FakeTier(4)
    driver = evicted(tier)
    names = set(chain.names("", PROMPT, 4, 8))
    driver.add(make_spec("again", PROMPT, max_tokens=1))
    driver.core.begin_step(driver.now)
    arrive(driver, tier)
    step = driver.core.begin_step(driver.now)
    assert step is not None
    assert step.fills
    assert not names & {save.name for save in driver.core.cached_blocks()}
    driver.core.finish_step(driver.worker.execute(step), driver.now + 1)
    assert names <= {save.name for save in driver.core.cached_blocks()}


def test_what_is_evicted_by_the_step_that_fills_it_is_not_saved() -> None:
    """The block holds something else when saves are made. The tier has lost what it gave, so it would take it."""
    tier = FakeTier(4)
    driver = evicted(tier)

    def quick_step() -> SchedulerOutput:
        step = driver.core.begin_step(driver.now)
        assert step is not None
        driver.now += 0.001  # the load keeps pace
        driver.take(driver.core.finish_step(driver.worker.execute(step), driver.now))
        driver.core.check_invariants()
        return step

    others = [make_spec(name, prompt(14, 2 + index), max_tokens=12) for index, name in enumerate(("one", "two"))]
    again = make_spec("again", PROMPT[:21], max_tokens=2, arrival=1.0)  # five blocks to load and a last one
    for spec in others:
        driver.add(spec)
    quick_step()
    driver.add(again)
    quick_step()
    arrive(driver, tier, 4)
    while driver.core.stats().num_free_blocks:
        quick_step()
    for _ in range(3):
        quick_step()
    arrive(driver, tier, ended=True)
    tier.stored.clear()
    step = quick_step()  # the worker checks what it saves
    filled = {block_id for fill in step.fills for block_id in fill.block_ids}
    assert filled & {block_id for chunk in step.chunks for block_id in chunk.block_ids}, "they took what it had"
    assert driver.core.stats().preemptions == 1
    assert not step.saves
    driver.drain()
    for spec in (*others, again):
        assert driver.outputs[spec.request_id] == expected_tokens(spec, vocab_size=7, max_model_len=64)[0]


def test_the_whole_cache_best_first() -> None:
    tier = FakeTier(4)
    driver = Driver.of(make_core(num_blocks=16, tier=tier), tier=tier)
    driver.add(make_spec("a", prompt(17), max_tokens=1))
    driver.drain()
    driver.add(make_spec("b", prompt(17, 1), max_tokens=9))
    driver.step()
    blocks = driver.core.cached_blocks()
    tier.save(blocks, driver.worker.slots)  # checks the names
    position = {save.name: index for index, save in enumerate(blocks)}
    for salted in (prompt(17), prompt(17, 1)):
        order = [position[name] for name in chain.names("", salted, 4, 4)]
        assert order == sorted(order), "a block is of no use without those before it"
