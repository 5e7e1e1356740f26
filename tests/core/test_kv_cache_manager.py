"""What is reused, shared, and given up for others, seen through small schedules."""

from __future__ import annotations

from headstart.core.events import RequestPreempted
from tests.core.harness import Driver, expected_tokens, make_core, make_spec, prompt


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
    core = make_core(chunk=64, max_num_seqs=4)
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
    core = make_core(num_blocks=8, max_num_seqs=4, chunk=64)
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
    core = make_core(num_blocks=8, max_num_seqs=4, chunk=64)
    driver = Driver.of(core)
    driver.add(make_spec("a", prompt(16), max_tokens=12))
    driver.step()
    driver.add(make_spec("b", prompt(16, 1), max_tokens=2))
    driver.step()
    assert core.stats().num_running == 1, "four blocks would fit the prompt, but leave none for the next decode"
    driver.drain()
    assert core.stats().preemptions == 0
