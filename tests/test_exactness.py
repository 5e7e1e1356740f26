"""The exactness promise: greedy tokens do not depend on how a request was served.

One property over a real trained model: whatever the arrivals, chunk sizes, cache, tier, block size, pool size (so
preemption) and depth of the pipeline, each request yields what it yields alone, cold and in one chunk. By our kernels
not only the tokens but their log-probabilities are the same to the last bit, in every format of weights and pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.config import CacheConfig, Config, KVCacheDType, ModelConfig, Quantization, SchedulerConfig
from headstart.core.cost import LinearCosts
from headstart.core.engine_core import EngineCore
from headstart.core.request import EngineRequest, SamplingParams
from headstart.core.step import ModelOutput
from headstart.hub import resolve
from headstart.kv.tiers import RamTier, TierConnector
from headstart.perf.model_spec import read_model_spec
from headstart.worker import Worker
from tests.fixtures.stories import make_stories_folder

Served = list[tuple[int, float]]  # token id, log-probability
NUM_BLOCKS = {4: 256, 16: 64}  # by block size: 1,024 tokens of pool, of which an example uses a part
BYTES_PER_TOKEN = 2560  # at most, in any format
FORMATS: tuple[tuple[Quantization, KVCacheDType], ...] = (
    ("none", "float32"), ("int8", "float32"), ("int4", "int8"), ("fp8", "fp8"), ("int8", "float16"),
)  # fmt: skip


@dataclass(frozen=True)
class Arrival:
    prompt: tuple[int, ...]
    max_tokens: int
    step: int  # arrives before this step
    slo_ttft: float | None = None  # seconds
    tenant: str = ""


FLOOD = [Arrival(tuple((31 * seed + 7 * index) % 509 + 3 for index in range(159)), 1, 0) for seed in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADSTART_CACHE", str(tmp_path_factory.mktemp("cache")))  # of quantized weights
        yield make_stories_folder(tmp_path_factory.mktemp("stories"))


@cache
def worker_for(folder: Path, block_size: int, quantization: Quantization, kv_cache_dtype: KVCacheDType) -> Worker:
    files = resolve(str(folder))
    config = Config(
        model=ModelConfig(model=str(folder), max_model_len=512, threads=1, quantization=quantization),
        cache=CacheConfig(
            block_size=block_size,
            kv_cache_memory=NUM_BLOCKS[block_size] * block_size * BYTES_PER_TOKEN,
            kv_cache_dtype=kv_cache_dtype,
        ),
    )
    worker = Worker(config, files, read_model_spec(files))
    worker.start()
    return worker


def serve(
    worker: Worker,
    core: EngineCore,
    arrivals: list[Arrival],
    depth: int,
    names: str,
    tier: TierConnector | None = None,
) -> dict[str, Served]:
    """Run all requests, `depth` steps in flight; returns each one's tokens with their log-probabilities."""
    pending = deque(sorted(enumerate(arrivals), key=lambda item: item[1].step))
    outputs: dict[str, Served] = {}
    in_flight: deque[ModelOutput] = deque()
    step_number = 0
    while pending or core.has_work:
        while pending and (pending[0][1].step <= step_number or not core.has_work):
            index, arrival = pending.popleft()
            params = SamplingParams(max_tokens=arrival.max_tokens, temperature=0.0, logprobs=0)
            name = f"{names}{index}"
            outputs[name] = []
            now = float(step_number)
            spec = EngineRequest(name, arrival.prompt, params, now, tenant=arrival.tenant, slo_ttft=arrival.slo_ttft)
            core.add_request(spec, now)
        if tier is not None:
            for arrived in tier.take_arrivals():
                core.kv_arrived(arrived)
        step = core.begin_step(float(step_number))
        if step is not None:
            in_flight.append(worker.execute(step))
        if in_flight and (step is None or len(in_flight) == depth):
            step_number += 1
            for output in core.finish_step(in_flight.popleft(), float(step_number)):
                assert output.error is None
                logprobs = [entry.logprob for entry in output.logprobs]
                outputs[output.request_id].extend(zip(output.token_ids, logprobs, strict=True))
        elif step is None and tier is not None and core.has_work:
            tier.wait(1.0)
        core.check_invariants()
    return outputs


def alone(worker: Worker, arrival: Arrival, block_size: int) -> Served:
    worker.reset()
    core = EngineCore(
        SchedulerConfig(max_num_batched_tokens=1024),
        LinearCosts(),
        num_blocks=NUM_BLOCKS[block_size],
        block_size=block_size,
        max_model_len=512,
        prefix_cache=False,
    )
    return serve(worker, core, [replace(arrival, step=0)], 1, "r")["r0"]


@st.composite
def arrival_lists(draw: st.DrawFn) -> list[Arrival]:
    """Prompts of random tokens; some share a prefix with an earlier one, as the turns of a chat do."""
    arrivals: list[Arrival] = []
    for _ in range(draw(st.integers(1, 5))):
        shared: tuple[int, ...] = ()
        if arrivals and draw(st.booleans()):
            earlier = draw(st.sampled_from(arrivals)).prompt
            shared = earlier[: draw(st.integers(0, len(earlier)))]
        seed = draw(st.integers(0, 2**32 - 1))
        length = draw(st.integers(1, 90))
        rest = tuple((seed * 2654435761 + index * index * 40503 + index * 7) % 509 + 3 for index in range(length))
        arrivals.append(
            Arrival(
                (*shared, *rest)[:150],
                max_tokens=draw(st.integers(1, 20)),
                step=draw(st.integers(0, 12)),
                slo_ttft=draw(st.sampled_from([None, 1.0, 20.0])),
                tenant=draw(st.sampled_from(["", "other"])),
            )
        )
    return arrivals


@settings(max_examples=60, deadline=None)
@given(
    formats=st.sampled_from(FORMATS),
    arrivals=arrival_lists(),
    chunk=st.integers(1, 64),
    mixed=st.integers(1, 64),
    block_size=st.sampled_from([4, 16]),
    pool_tokens=st.sampled_from([192, 320, 1024]),
    policy=st.sampled_from(["fcfs", "srpf", "edf"]),
    srpf_weight=st.sampled_from([10.0, 1000.0]),  # at 1,000 whoever comes later and is shorter pauses a prefill
    depth=st.sampled_from([1, 2]),
    prefix_cache=st.booleans(),
    horizon=st.sampled_from([float("inf"), 40.0]),
    max_num_seqs=st.integers(1, 6),
    with_tier=st.booleans(),
)
def test_greedy_tokens_do_not_depend_on_how_a_request_was_served(
    folder: Path,
    formats: tuple[Quantization, KVCacheDType],
    arrivals: list[Arrival],
    chunk: int,
    mixed: int,
    block_size: int,
    pool_tokens: int,
    policy: str,
    srpf_weight: float,
    depth: int,
    prefix_cache: bool,
    horizon: float,
    max_num_seqs: int,
    with_tier: bool,
) -> None:
    worker = worker_for(folder, block_size, *formats)
    expected = [alone(worker, arrival, block_size) for arrival in arrivals]
    worker.reset()
    config = SchedulerConfig(
        policy=policy,  # type: ignore[arg-type]
        slo_ttft_ms=5000,
        srpf_weight=srpf_weight,
        max_num_batched_tokens=max_num_seqs + chunk,
        max_chunk_ms=chunk,
        slo_tpot_ms=mixed,
        attention_horizon=horizon,
        max_num_seqs=max_num_seqs,
        pipeline_depth=depth,
    )
    assert worker.pool is not None
    tier = TierConnector(worker.pool, [RamTier(1 << 30)]) if with_tier else None
    worker.use_tiers(tier)
    core = EngineCore(
        config,
        LinearCosts(
            prefill_token=1e-3, prefill_context=1e-3 / horizon
        ),  # a millisecond a token, and more behind others
        num_blocks=pool_tokens // block_size,
        block_size=block_size,
        max_model_len=pool_tokens,
        prefix_cache=prefix_cache,
        connector=tier,
    )
    try:
        cold = serve(worker, core, arrivals, depth, "cold", tier)
        if tier is not None:  # push out what is cached, so that it has to be loaded
            serve(worker, core, FLOOD[: pool_tokens // 160], depth, "flood", tier)
        warm = serve(worker, core, arrivals, depth, "warm", tier)
    finally:
        worker.use_tiers(None)
        if tier is not None:
            tier.close()
    assert [cold[f"cold{index}"] for index in range(len(arrivals))] == expected
    assert [warm[f"warm{index}"] for index in range(len(arrivals))] == expected
