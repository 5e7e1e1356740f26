"""The exactness promise where steps really overlap: the next one is scheduled while the executor's thread computes.

`test_exactness.py` moves the core by hand, so that Hypothesis may choose every step. Here the parts that serve do it:
`InProcessEngine`, `LocalExecutor` and the real worker, with two and three steps in flight. Sampling is part of it:
seeds, penalties and stop tokens must come out alike though the token that they hang on was not known at scheduling.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from headstart.core.cost import LinearCosts
from headstart.core.engine_core import EngineCore
from headstart.core.request import EngineRequest, FinishReason, SamplingParams
from headstart.core.stats import CoreStats
from headstart.core.step import ModelOutput, SchedulerOutput
from headstart.engine.inprocess import InProcessEngine
from headstart.executor.base import ExecutorInfo
from headstart.executor.local import LocalExecutor
from headstart.hub import resolve
from headstart.perf.model_spec import read_model_spec
from headstart.worker import Worker
from tests.fixtures.stories import make_stories_folder

BLOCK_SIZE = 8
NUM_BLOCKS = 128
CONTEXT = 256
BYTES_PER_TOKEN = 2560  # of stories260K in float32, at most

Answer = tuple[tuple[tuple[int, float], ...], FinishReason]  # token ids with log-probabilities, and why it ended


class WatchedExecutor:
    """An executor that counts the steps which were submitted while the one before was still to be computed."""

    def __init__(self, executor: LocalExecutor) -> None:
        self._executor = executor
        self._last: Future[ModelOutput] | None = None
        self.num_overlapped = 0

    def start(self) -> ExecutorInfo:
        return self._executor.start()

    def submit(self, step: SchedulerOutput) -> Future[ModelOutput]:
        self.num_overlapped += self._last is not None and not self._last.done()
        self._last = self._executor.submit(step)
        return self._last

    def shutdown(self) -> None:
        self._executor.shutdown()


@dataclass(frozen=True)
class Rig:
    """One loaded model for all cores of this module; answers of requests alone are kept."""

    worker: Worker
    executor: WatchedExecutor
    known: dict[tuple[tuple[int, ...], SamplingParams], Answer]

    def serve(self, core: EngineCore, requests: Sequence[EngineRequest]) -> tuple[dict[str, Answer], CoreStats]:
        """All requests through one engine, together as far as its queue holds them."""
        self.worker.reset()  # nothing is in flight: the run before has settled
        engine = InProcessEngine(core, self.executor)
        tokens: dict[str, list[tuple[int, float]]] = {request.request_id: [] for request in requests}
        reasons: dict[str, FinishReason] = {}
        for output in engine.run(requests):
            assert output.error is None
            logprobs = [entry.logprob for entry in output.logprobs]
            tokens[output.request_id] += zip(output.token_ids, logprobs, strict=True)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
        core.check_invariants()
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)
        return {name: (tuple(found), reasons[name]) for name, found in tokens.items()}, stats

    def alone(self, request: EngineRequest) -> Answer:
        """By itself, cold, in one chunk, one step in flight."""
        key = (request.prompt_token_ids, request.params)
        if key not in self.known:
            core = make_core(
                SchedulerConfig(max_num_batched_tokens=CONTEXT, max_chunk_ms=2 * CONTEXT, pipeline_depth=1),
                NUM_BLOCKS,
                prefix_cache=False,
            )
            self.known[key] = self.serve(core, [request])[0][request.request_id]
        return self.known[key]


def make_core(config: SchedulerConfig, num_blocks: int, *, prefix_cache: bool = True) -> EngineCore:
    return EngineCore(
        config,
        LinearCosts(prefill_token=1e-3),  # a millisecond a token
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=min(CONTEXT, num_blocks * BLOCK_SIZE),
        prefix_cache=prefix_cache,
    )


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder: Path = make_stories_folder(tmp_path_factory.mktemp("stories"))
    files = resolve(str(folder))
    config = Config(
        model=ModelConfig(model=str(folder), max_model_len=CONTEXT, threads=1, quantization="none"),
        cache=CacheConfig(block_size=BLOCK_SIZE, kv_cache_memory=NUM_BLOCKS * BLOCK_SIZE * BYTES_PER_TOKEN),
    )
    worker = Worker(config, files, read_model_spec(files))
    executor = WatchedExecutor(LocalExecutor(worker))
    executor.start()
    yield Rig(worker, executor, {})
    executor.shutdown()


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    return tuple((seed * 7919 + index * index * 40503 + index * 7) % 509 + 3 for index in range(length))


def greedy(max_tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=0, **fields)  # type: ignore[arg-type]


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    """Greedy, greedy until one of half of all tokens, penalised, or drawn with a seed."""
    max_tokens = draw(st.integers(1, 24))
    kind = draw(st.sampled_from(["greedy", "stopped", "penalised", "seeded"]))
    if kind == "stopped":
        return greedy(max_tokens, stop_token_ids=tuple(range(3, 512, 2)))
    if kind == "penalised":
        return greedy(max_tokens, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4)
    if kind == "seeded":
        seed = draw(st.integers(0, 2**31))
        return SamplingParams(max_tokens=max_tokens, temperature=0.9, top_p=0.95, top_k=40, seed=seed, logprobs=0)
    return greedy(max_tokens)


@st.composite
def requests(draw: st.DrawFn) -> list[EngineRequest]:
    """Some share a prefix with an earlier one, as the turns of a chat do."""
    made: list[EngineRequest] = []
    for index in range(draw(st.integers(2, 7))):
        shared: tuple[int, ...] = ()
        if made and draw(st.booleans()):
            earlier = draw(st.sampled_from(made)).prompt_token_ids
            shared = earlier[: draw(st.integers(0, len(earlier)))]
        rest = prompt_of(draw(st.integers(0, 2**20)), draw(st.integers(1, 60)))
        made.append(EngineRequest(f"r{index}", (*shared, *rest)[:100], draw(params()), arrival_time=0.0))
    return made


@settings(max_examples=12, deadline=None)
@given(
    batch=requests(),
    depth=st.sampled_from([2, 3]),
    chunk=st.integers(1, 64),
    mixed=st.integers(1, 64),
    num_blocks=st.sampled_from([18, 32, NUM_BLOCKS]),
    policy=st.sampled_from(["fcfs", "srpf"]),
    max_num_seqs=st.integers(1, 6),
    max_num_waiting=st.integers(1, 8),
    prefix_cache=st.booleans(),
)
def test_answers_do_not_depend_on_steps_in_flight(
    rig: Rig,
    batch: list[EngineRequest],
    depth: int,
    chunk: int,
    mixed: int,
    num_blocks: int,
    policy: str,
    max_num_seqs: int,
    max_num_waiting: int,
    prefix_cache: bool,
) -> None:
    expected = {request.request_id: rig.alone(request) for request in batch}
    config = SchedulerConfig(
        policy=policy,  # type: ignore[arg-type]
        max_num_batched_tokens=max_num_seqs + chunk,
        max_chunk_ms=chunk,
        slo_tpot_ms=mixed,
        max_num_seqs=max_num_seqs,
        max_num_waiting=max_num_waiting,
        pipeline_depth=depth,
    )
    found, _ = rig.serve(make_core(config, num_blocks, prefix_cache=prefix_cache), batch)
    assert found == expected


@pytest.mark.parametrize("depth", [2, 3])
def test_steps_overlap_and_preempted_requests_lose_nothing(rig: Rig, depth: int) -> None:
    """What the property above stands on: steps do overlap, and a small pool does make requests yield their blocks."""
    batch = [
        EngineRequest(f"r{index}", prompt_of(index, 30 + 3 * index), greedy(40 + index), arrival_time=0.0)
        for index in range(6)
    ]
    expected = {request.request_id: rig.alone(request) for request in batch}
    before = rig.executor.num_overlapped
    config = SchedulerConfig(max_num_batched_tokens=40, slo_tpot_ms=16, max_num_seqs=6, pipeline_depth=depth)
    found, stats = rig.serve(make_core(config, 30), batch)
    assert found == expected
    assert stats.preemptions > 0
    assert rig.executor.num_overlapped - before > 40, "the answers alone take more steps than that"


def test_a_run_that_is_closed_midway_leaves_a_clean_engine(rig: Rig) -> None:
    """Steps are in flight when their requests are aborted; who comes next is answered as if nobody had been there."""
    config = SchedulerConfig(max_num_batched_tokens=24, slo_tpot_ms=12, max_num_seqs=4, pipeline_depth=2)
    core = make_core(config, NUM_BLOCKS)
    rig.worker.reset()
    engine = InProcessEngine(core, rig.executor)
    leaving = [EngineRequest(f"gone{index}", prompt_of(index, 40), greedy(60), 0.0) for index in range(8)]
    list(itertools.islice(outputs := engine.run(leaving), 20))
    outputs.close()  # type: ignore[attr-defined]
    core.check_invariants()
    assert engine.stats().num_free_blocks == NUM_BLOCKS
    staying = [EngineRequest(f"r{index}", prompt_of(index, 50), greedy(20), 0.0) for index in range(4)]
    found: dict[str, list[tuple[int, float]]] = {request.request_id: [] for request in staying}
    for output in engine.run(staying):
        logprobs = [entry.logprob for entry in output.logprobs]
        found[output.request_id] += zip(output.token_ids, logprobs, strict=True)
    assert any(output_of for output_of in found.values())
    for request in staying:
        assert tuple(found[request.request_id]) == rig.alone(request)[0]
