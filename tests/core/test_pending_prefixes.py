"""Who arrives while its prefix is being computed waits for it, and goes on at once when it will not come."""

from __future__ import annotations

import pytest

from headstart.core import scheduler
from headstart.core.engine_core import EngineCore
from headstart.core.request import FinishReason
from tests.core.harness import Driver, expected_tokens, lengths, make_core, make_spec, prompt

SHARED = prompt(128)


def make(**settings: object) -> tuple[Driver, EngineCore]:
    core = make_core(
        num_blocks=256,
        **{"chunk": 64, "mixed": 64, "max_num_seqs": 8, "policy": "fcfs", **settings},  # type: ignore[arg-type]
    )
    return Driver.of(core), core


def add(driver: Driver, name: str, *rest: int, arrival: float = 0.0, **more: object) -> None:
    driver.add(make_spec(name, [*SHARED, *rest], arrival=arrival, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [64, 256])
def test_identical_prompts_that_arrive_together_are_computed_once(depth: int, chunk: int) -> None:
    driver, core = make(chunk=chunk, pipeline_depth=depth)
    for index in range(6):
        add(driver, f"r{index}", 5, 6)
    results = []
    while core.has_work:
        step = core.begin_step(driver.now)
        if step is not None:
            results.append(driver.worker.execute(step))
        if results and (step is None or len(results) == depth):
            driver.now += 1
            driver.take(core.finish_step(results.pop(0), driver.now))
        core.check_invariants()
    assert core.stats().prompt_tokens_computed == 130 + 5 * 2
    assert len({tuple(tokens) for tokens in driver.outputs.values()}) == 1


def test_a_thousand_token_prefix_is_computed_once() -> None:
    core = make_core(num_blocks=512, block_size=16, chunk=256, max_num_seqs=32, max_model_len=2048)
    driver = Driver.of(core, block_size=16)
    for index in range(20):
        driver.add(make_spec(f"r{index}", prompt(1_000)))
    driver.drain()
    assert core.stats().prompt_tokens_computed == 1_000 + 19 * 8


def test_others_pass_those_who_wait() -> None:
    driver, _ = make()
    add(driver, "first")
    add(driver, "second", 1)
    driver.add(make_spec("other", prompt(20, 9)))
    assert lengths(driver.step()) == {"first": 64}
    assert lengths(driver.step()) == {"first": 64}
    assert lengths(driver.step()) == {"first": 1, "second": 1, "other": 20}


def test_only_the_common_part_is_waited_for() -> None:
    driver, core = make()
    driver.add(make_spec("long", [*SHARED, *[3] * 200]))
    add(driver, "short", 1, arrival=1)
    for _ in range(2):
        assert lengths(driver.step()) == {"long": 64}
    driver.core.check_invariants()
    driver.drain()
    assert driver.finished["short"].num_cached_tokens == 128
    assert core.stats().prompt_tokens_computed == 328 + 1


def test_the_owner_runs_at_its_waiters_place() -> None:
    """A prompt of high priority does not wait behind others for a prefix that one of low priority computes."""
    driver, core = make()
    add(driver, "low", *[2] * 60, priority=2)
    assert lengths(driver.step()) == {"low": 64}
    driver.add(make_spec("middle", prompt(200, 9), priority=1))
    add(driver, "high", 1, priority=0)
    assert lengths(driver.step()) == {"low": 64}, "the first time it comes up"
    assert list(lengths(driver.step())) == ["high", "middle"]
    driver.drain()
    assert core.stats().prompt_tokens_computed == 188 + 200 + 1


def test_the_owner_keeps_its_waiters_place_until_the_common_part_is_done() -> None:
    driver, _ = make(chunk=32, mixed=32)
    add(driver, "low", *[2] * 60, priority=2)
    driver.step()
    driver.add(make_spec("middle", prompt(200, 9), priority=1))
    add(driver, "high", 1, priority=0)
    for _ in range(3):
        assert lengths(driver.step()) == {"low": 32}
    assert next(iter(lengths(driver.step()))) == "high"


def test_who_is_aborted_while_it_waits_lends_its_place_no_more() -> None:
    driver, core = make(chunk=32, mixed=32)
    add(driver, "low", *[2] * 60, priority=2)
    driver.step()
    driver.add(make_spec("middle", prompt(200, 9), priority=1))
    add(driver, "high", 1, priority=0)
    assert lengths(driver.step()) == {"low": 32}
    core.abort("high", driver.now)
    assert lengths(driver.step()) == {"middle": 32}
    driver.drain()
    assert driver.finished["high"].finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("end", ["abort", "failure"])
def test_when_the_owner_ends_its_waiters_go_on_at_once(end: str) -> None:
    driver, core = make()
    add(driver, "first")
    add(driver, "second", 1)
    if end == "failure":
        driver.worker.failing.add("first")
    assert lengths(driver.step()) == {"first": 64}
    if end == "abort":
        core.abort("first", driver.now)
    assert lengths(driver.step()) == {"second": 64}
    driver.drain()
    assert driver.finished["second"].finish_reason is FinishReason.LENGTH


def test_another_waiter_becomes_the_owner() -> None:
    driver, core = make(chunk=32, mixed=32)
    for name in ("first", "second", "third"):
        add(driver, name)
    driver.step()
    core.abort("first", driver.now)
    driver.drain()
    assert core.stats().prompt_tokens_computed == 128 + 4, "the first one's 32 tokens serve the second"


def test_a_preempted_owner_keeps_nobody_waiting() -> None:
    core = make_core(num_blocks=40, chunk=24, mixed=8, max_num_seqs=8, policy="fcfs", max_model_len=150)
    driver = Driver.of(core)
    specs = [make_spec(f"chat{index}", prompt(4, 9 + index), max_tokens=60) for index in range(3)]
    specs += [make_spec(name, [*SHARED[:96], 1], max_tokens=3, arrival=1) for name in ("first", "second")]
    for spec in specs:
        driver.add(spec)
    driver.drain()
    assert core.stats().preemptions > 0
    for spec in specs:
        assert driver.outputs[spec.request_id] == expected_tokens(spec, vocab_size=7, max_model_len=150)[0]


def test_salts_few_tokens_and_prompt_logprobs_wait_for_nobody() -> None:
    driver, _ = make(chunk=1024, mixed=1024)
    add(driver, "first")
    add(driver, "salted", salt="a")
    add(driver, "scored", prompt_logprobs=1)
    driver.add(make_spec("short", [*SHARED[:60], 9]))
    driver.add(make_spec("unlike", [*SHARED[:60], *[9] * 68]))
    assert set(lengths(driver.step())) == {"first", "salted", "scored", "short", "unlike"}


def test_nobody_waits_without_a_prefix_cache() -> None:
    driver, _ = make(chunk=1024, mixed=1024, prefix_cache=False)
    add(driver, "first")
    add(driver, "second")
    assert set(lengths(driver.step())) == {"first", "second"}
    driver.drain()


def test_a_step_sets_only_so_many_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_SET_ASIDE_PER_STEP", 2)
    driver, _ = make()
    for index in range(4):
        add(driver, f"r{index}")
    driver.add(make_spec("other", prompt(8, 9), arrival=1))
    assert lengths(driver.step()) == {"r0": 64}
    driver.step()
    driver.drain()
    assert len(driver.finished) == 5


def test_each_waiter_goes_on_when_what_it_shares_is_there() -> None:
    driver, core = make(chunk=32, mixed=32)
    long = [*SHARED, *[3] * 128]
    driver.add(make_spec("long", long))
    add(driver, "half", 1, arrival=1)
    driver.add(make_spec("all", [*long, 1], arrival=2))
    for _ in range(4):
        assert lengths(driver.step()) == {"long": 32}
    assert lengths(driver.step()) == {"long": 32}
    driver.drain()
    assert (driver.finished["half"].num_cached_tokens, driver.finished["all"].num_cached_tokens) == (128, 256)
    assert core.stats().prompt_tokens_computed == 256 + 2


def test_who_computes_something_else_is_no_owner() -> None:
    driver, core = make(chunk=32, mixed=32)
    add(driver, "known")
    driver.drain()
    driver.add(make_spec("else", prompt(256, 9), arrival=driver.now))
    for _ in range(4):  # as many tokens as the other one has in the cache
        driver.step()
    driver.add(make_spec("next", [*SHARED, *[1] * 128], arrival=driver.now, priority=-1))
    assert "next" in lengths(driver.step())
    driver.drain()
    assert core.stats().prompt_tokens_cached == 128
