"""The model runner: one step from the scheduler's words to tokens.

Owns the order of a step (forget, learn, forward, sample, report) and the worker's copy of the requests; knows the model
only as a `Decoder` and nothing of how a step was scheduled or where memory comes from. Letters: T rows of a step,
R rows that need logits, V vocabulary, C hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headstart.core.step import ChunkOutput, ModelOutput, ScheduledChunk, SchedulerOutput, TokenLogprob
from headstart.kv.pool import KVPool
from headstart.kv.tiers import TierConnector
from headstart.models import Decoder
from headstart.worker.input_batch import InputBatch, RequestState
from headstart.worker.logprobs import token_logprobs
from headstart.worker.sampler import NON_FINITE, Sampled, Sampler, finite_rows
from headstart.worker.threads import single_thread

_LOGITS_AT_ONCE = 1 << 24  # numbers: bounds the memory of prompt logprobs (64 MB)


class ModelRunner:
    """Executes steps in order. Keeps every live request's tokens, so a step may name tokens that it sampled itself."""

    def __init__(self, decoder: Decoder, pool: KVPool, vocab_size: int) -> None:
        self._decoder = decoder
        self._pool = pool
        self._vocab_size = vocab_size
        self._batch = InputBatch(pool.block_size, num_blocks=pool.num_blocks, vocab_size=vocab_size, device=pool.device)
        self._sampler = Sampler()
        self.tiers: TierConnector | None = None  # where evicted blocks go and loaded ones come from

    @property
    def num_requests(self) -> int:
        """Requests that are kept now."""
        return len(self._batch)

    def reset(self) -> None:
        """Forget all requests. What the KV pool holds no longer belongs to anyone."""
        self._batch.clear()

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Compute one step. A request whose logits are not finite gets an error; the others are unharmed."""
        before_layer = self._move_blocks(step)
        for request_id in step.finished_request_ids:  # first: an id may be used again by a new request
            self._batch.remove(request_id)
        for new in step.new_requests:
            self._batch.add(new)
        states = [self._batch.update(chunk) for chunk in step.chunks]
        live = [index for index, state in enumerate(states) if state.error is None]
        outputs = [ChunkOutput(state.request_id, error=state.error) for state in states]
        sample_seconds = 0.0
        if live:
            chunks, live_states = [step.chunks[index] for index in live], [states[index] for index in live]
            results, sample_seconds = self._compute(chunks, live_states, before_layer)
            for index, output in zip(live, results, strict=True):
                outputs[index] = output
        if step.fills:
            before_layer(-1)  # in a step without chunks nobody has waited for them
        return ModelOutput(step.step_id, tuple(outputs), sample_seconds)

    def _move_blocks(self, step: SchedulerOutput) -> Callable[[int], None]:
        """Evicted blocks out of the pool, then loaded ones into it. Returns what waits for those of a layer."""
        if self.tiers is None:
            assert not step.saves
            assert not step.fills
            return lambda layer: None
        self.tiers.save(step.saves)
        return self.tiers.fill(step.fills) if step.fills else lambda layer: None

    def _compute(
        self,
        chunks: Sequence[ScheduledChunk],
        states: Sequence[RequestState],
        before_layer: Callable[[int], None],
    ) -> tuple[list[ChunkOutput], float]:
        inputs = self._batch.build(chunks, states)
        hidden = self._decoder.forward(inputs.token_ids, inputs.layout, self._pool, before_layer)  # [T, C]
        watch = _Stopwatch(hidden.device)
        sampled = self._sample(hidden, chunks, states)
        outputs, first_row = [], 0
        for chunk, state in zip(chunks, states, strict=True):
            rows = hidden[first_row : first_row + chunk.num_scheduled_tokens]
            prompt_logprobs, error = self._prompt_logprobs(rows, chunk, state)
            outputs.append(_output(state, sampled.get(chunk.request_id), prompt_logprobs, error))
            first_row += chunk.num_scheduled_tokens
        return outputs, watch.seconds()

    def _sample(
        self, hidden: Tensor, chunks: Sequence[ScheduledChunk], states: Sequence[RequestState]
    ) -> dict[str, Sampled]:
        """The next token of each request whose chunk samples; only those rows see the LM head."""
        rows, sampling, next_row = [], [], 0
        for chunk, state in zip(chunks, states, strict=True):
            next_row += chunk.num_scheduled_tokens
            if chunk.samples:
                rows.append(next_row - 1)
                sampling.append(state)
        if not rows:
            return {}
        needed = hidden if len(rows) == len(hidden) else hidden[torch.tensor(rows, device=hidden.device)]
        logits = self._decoder.logits(needed)  # [R, V]
        with single_thread():
            results = self._sampler.sample(logits, [state.sampling for state in sampling])
        return {state.request_id: result for state, result in zip(sampling, results, strict=True)}

    def _prompt_logprobs(
        self, hidden: Tensor, chunk: ScheduledChunk, state: RequestState
    ) -> tuple[tuple[TokenLogprob, ...], str | None]:
        """Logprobs of the prompt tokens that follow a chunk's rows, for requests that asked; or why there are none."""
        num_top = state.params.prompt_logprobs
        count = min(chunk.start + chunk.num_scheduled_tokens, state.num_prompt_tokens - 1) - chunk.start
        if num_top is None or count <= 0:
            return (), None
        targets = state.tokens.array[chunk.start + 1 : chunk.start + 1 + count].tolist()
        at_once = max(1, _LOGITS_AT_ONCE // self._vocab_size)
        found: list[TokenLogprob] = []
        for begin in range(0, count, at_once):
            some = targets[begin : begin + at_once]
            logits = self._decoder.logits(hidden[begin : begin + len(some)])
            if not all(finite_rows(logits)):
                return (), NON_FINITE
            found += token_logprobs(logits, some, [num_top] * len(some))
        return tuple(found), None


def _output(
    state: RequestState, sampled: Sampled | None, prompt_logprobs: tuple[TokenLogprob, ...], error: str | None
) -> ChunkOutput:
    """One chunk's result; keeps the sampled token, or the error, in the request's state."""
    error = error or (sampled.error if sampled else None)
    if error is not None:
        state.error = error
        return ChunkOutput(state.request_id, error=error)
    if sampled is None:
        return ChunkOutput(state.request_id, prompt_logprobs=prompt_logprobs)
    state.append(sampled.token_id)
    logprobs = () if sampled.logprob is None else (sampled.logprob,)
    return ChunkOutput(state.request_id, (sampled.token_id,), logprobs, prompt_logprobs)


class _Stopwatch:
    """Seconds of compute since it was made. On CUDA by events: the host runs ahead of the forward pass there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record()
        else:
            self._started = time.perf_counter()

    def seconds(self) -> float:
        if self._device.type != "cuda":
            return time.perf_counter() - self._started
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        return self._begin.elapsed_time(end) / 1000.0
