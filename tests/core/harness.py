"""A worker without a model: checks every step against what the KV pool really holds, and samples by a fixed rule.

Each slot of its pool remembers which prefix was written into it. Computing a token at position p reads the slots of
positions 0..p through the block table; each must hold exactly the request's own prefix, else some block was shared,
reused or handed on wrongly. The next token is a hash of the whole prefix, so any wrong token anywhere shows.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from headstart.config import SchedulerConfig
from headstart.core.cost import LinearCosts
from headstart.core.engine_core import EngineCore
from headstart.core.request import EngineRequest, FinishReason, SamplingParams
from headstart.core.step import ChunkOutput, ModelOutput, RequestOutput, ScheduledChunk, SchedulerOutput
from tests.core.fake_tier import FakeTier


def next_token(prefix: tuple[int, ...], vocab_size: int) -> int:
    return zlib.crc32(repr(prefix).encode()) % vocab_size


def expected_tokens(spec: EngineRequest, *, vocab_size: int, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What a request must yield, computed alone."""
    tokens = list(spec.prompt_token_ids)
    outputs: list[int] = []
    while len(outputs) < spec.params.max_tokens and len(tokens) < max_model_len:
        token = next_token(tuple(tokens), vocab_size)
        if token in spec.params.stop_token_ids:
            return outputs, FinishReason.STOP
        tokens.append(token)
        outputs.append(token)
    return outputs, FinishReason.LENGTH


def make_spec(
    request_id: str,
    prompt: list[int] | tuple[int, ...],
    *,
    max_tokens: int = 4,
    arrival: float = 0.0,
    priority: int = 0,
    salt: str = "",
    stop: tuple[int, ...] = (),
    prompt_logprobs: int | None = None,
    tenant: str = "",
    slo_ttft: float | None = None,
) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, stop_token_ids=stop, prompt_logprobs=prompt_logprobs)
    return EngineRequest(request_id, tuple(prompt), params, arrival, priority, salt, tenant=tenant, slo_ttft=slo_ttft)


def make_core(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    prefix_cache: bool = True,
    tier: FakeTier | None = None,
    **scheduler: object,
) -> EngineCore:
    """A core for which a step takes a second, and a millisecond for each token of prefill (and of context, times
    `context_ms`): `chunk` and `mixed` are then the tokens of prefill in a step without and with decodes.
    """
    max_model_len = scheduler.pop("max_model_len", num_blocks * block_size)
    chunk, mixed = scheduler.pop("chunk", 256), scheduler.pop("mixed", 64)
    context_ms = scheduler.pop("context_ms", 0.0)
    assert isinstance(chunk, int)
    assert isinstance(mixed, int)
    assert isinstance(context_ms, float)
    costs = LinearCosts(step=1.0, prefill_token=1e-3, prefill_context=context_ms / 1000)
    settings: dict[str, object] = {
        "max_num_batched_tokens": max(chunk, mixed, 65),
        "max_chunk_ms": 1000.5 + chunk,
        "slo_tpot_ms": 1000.5 + mixed,
        **scheduler,
    }
    return EngineCore(
        SchedulerConfig(**settings),
        costs,  # type: ignore[arg-type]
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,  # type: ignore[arg-type]
        prefix_cache=prefix_cache,
        connector=tier,
    )


@dataclass
class FakeWorker:
    block_size: int
    vocab_size: int = 2
    tokens: dict[str, list[int]] = field(default_factory=dict)
    params: dict[str, SamplingParams] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    slots: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    salts: dict[str, str] = field(default_factory=dict)
    failing: set[str] = field(default_factory=set)
    tier: FakeTier | None = None

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        if self.tier is not None:
            self.tier.save(step.saves, self.slots)
            self.tier.fill(step.fills, self.slots)
        else:
            assert not step.saves
            assert not step.fills
        for new in step.new_requests:
            assert new.request_id not in self.tokens, "a request is introduced once"
            self.tokens[new.request_id] = list(new.prompt_token_ids)
            self.params[new.request_id] = new.params
            self.tables[new.request_id] = []
        assert len({chunk.request_id for chunk in step.chunks}) == len(step.chunks)
        results = [self._chunk(chunk) for chunk in step.chunks]
        for request_id in step.finished_request_ids:
            del self.tokens[request_id], self.params[request_id], self.tables[request_id]
        return ModelOutput(step.step_id, tuple(results), sample_seconds=0.0)

    def _chunk(self, chunk: ScheduledChunk) -> ChunkOutput:
        name = chunk.request_id
        tokens, table = self.tokens[name], self.tables[name]
        assert chunk.block_offset <= len(table)
        table[chunk.block_offset :] = chunk.block_ids
        if name in self.failing:  # for good: a step in flight may count on a token that was never sampled
            return ChunkOutput(name, error="non-finite logits")
        start, end = chunk.start, chunk.start + chunk.num_scheduled_tokens
        assert start < end <= len(tokens), "a chunk computes tokens that exist"
        salt = self.salts.get(name, "")
        for position in range(start, end):
            block = table[position // self.block_size]
            self.slots[block, position % self.block_size] = (salt, tuple(tokens[: position + 1]))
        for position in range(end):
            held = self.slots.get((table[position // self.block_size], position % self.block_size))
            assert held == (salt, tuple(tokens[: position + 1])), f"{name} reads a foreign slot at {position}"
        assert chunk.samples == (end == len(tokens) and self.params[name].max_tokens > 0)
        if not chunk.samples:
            return ChunkOutput(name)
        token = next_token(tuple(tokens), self.vocab_size)
        tokens.append(token)
        return ChunkOutput(name, token_ids=(token,))


@dataclass
class Driver:
    """Runs a core against the fake worker: one step after the other, each taking one second."""

    core: EngineCore
    worker: FakeWorker
    now: float = 0.0
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, RequestOutput] = field(default_factory=dict)
    steps: list[SchedulerOutput] = field(default_factory=list)

    @classmethod
    def of(cls, core: EngineCore, *, block_size: int = 4, vocab_size: int = 7, tier: FakeTier | None = None) -> Driver:
        return cls(core, FakeWorker(block_size, vocab_size, tier=tier))

    def add(self, spec: EngineRequest) -> None:
        self.core.add_request(spec, self.now)
        self.worker.salts[spec.request_id] = spec.cache_salt
        self.outputs.setdefault(spec.request_id, [])

    def take(self, news: list[RequestOutput]) -> None:
        for output in news:
            assert output.request_id not in self.finished, "news after the last"
            self.outputs[output.request_id].extend(output.token_ids)
            if output.finish_reason is not None:
                self.finished[output.request_id] = output

    def step(self) -> SchedulerOutput | None:
        """Begin one step, run it, take it in."""
        step = self.core.begin_step(self.now)
        if step is None:
            return None
        self.steps.append(step)
        self.now += 1
        self.take(self.core.finish_step(self.worker.execute(step), self.now))
        self.core.check_invariants()
        return step

    def drain(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.core.has_work:
                self.take(self.core.take_outputs())
                return
            assert self.step() is not None, "work is left but no step can run"
        raise AssertionError("the core does not come to rest")


def prompt(length: int, first: int = 0) -> list[int]:
    """Unlike for another `first`, from the first token on."""
    return [first, *(index % 5 for index in range(length - 1))]


def lengths(step: SchedulerOutput | None) -> dict[str, int]:
    assert step is not None
    return {chunk.request_id: chunk.num_scheduled_tokens for chunk in step.chunks}
