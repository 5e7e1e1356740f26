"""InProcessEngine: the same driver without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from headstart.config import SchedulerConfig
from headstart.core.errors import RequestTooLong
from headstart.core.request import EngineRequest, FinishReason, SamplingParams
from headstart.engine.inprocess import InProcessEngine
from headstart.executor.local import LocalExecutor
from tests.engine.scripted import CRASH_TOKEN, CountingWorker, Script, expected_tokens


def make_request(request_id: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4) -> EngineRequest:
    return EngineRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens), arrival_time=0.0)


@pytest.fixture
def make_engine() -> Iterator[Callable[[Script], InProcessEngine]]:
    made: list[InProcessEngine] = []

    def make(script: Script) -> InProcessEngine:
        executor = LocalExecutor(CountingWorker(script))
        executor.start()
        made.append(InProcessEngine(script.make_core(), executor))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def assert_idle(engine: InProcessEngine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_more_requests_than_the_queue_holds_all_finish(
    make_engine: Callable[[Script], InProcessEngine], depth: int
) -> None:
    config = SchedulerConfig(max_num_seqs=3, max_num_waiting=5, pipeline_depth=depth)
    engine = make_engine(Script(scheduler=config))
    requests = [make_request(f"r{index}", (index, index + 7), 1 + index % 5) for index in range(60)]
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for output in engine.run(requests):
        tokens[output.request_id] += output.token_ids
    for request in requests:
        assert tokens[request.request_id] == expected_tokens(request.prompt_token_ids, request.params.max_tokens)
    assert_idle(engine)


def test_closing_the_iterator_aborts_the_rest(make_engine: Callable[[Script], InProcessEngine]) -> None:
    engine = make_engine(Script(scheduler=SchedulerConfig(pipeline_depth=2)))
    outputs = engine.run([make_request("a", max_tokens=100), make_request("b", (9, 9), 100)])
    next(outputs)
    outputs.close()
    assert_idle(engine)
    assert engine.stats().aborts == 2
    assert list(engine.run([]))[:1] == []


def test_aborting_one_of_a_run_lets_the_others_finish(make_engine: Callable[[Script], InProcessEngine]) -> None:
    engine = make_engine(Script())
    reasons = {}
    for output in engine.run([make_request("a", max_tokens=100), make_request("b", (9, 9), 5)]):
        if output.request_id == "a" and output.num_output_tokens == 2 and output.finish_reason is None:
            engine.abort("a")
        if output.finish_reason is not None:
            reasons[output.request_id] = output.finish_reason
    assert reasons == {"a": FinishReason.ABORT, "b": FinishReason.LENGTH}
    assert_idle(engine)


def test_a_request_that_can_never_run_is_refused_and_nothing_is_left(
    make_engine: Callable[[Script], InProcessEngine],
) -> None:
    engine = make_engine(Script())
    with pytest.raises(RequestTooLong):
        list(engine.run([make_request("a"), make_request("long", tuple(range(999)))]))
    assert_idle(engine)


def test_a_failed_step_is_raised(make_engine: Callable[[Script], InProcessEngine]) -> None:
    engine = make_engine(Script())
    with pytest.raises(RuntimeError, match="the model broke"):
        list(engine.run([make_request("a", (CRASH_TOKEN,))]))
    with pytest.raises(RuntimeError, match="make a new one"):
        list(engine.run([make_request("b")]))
