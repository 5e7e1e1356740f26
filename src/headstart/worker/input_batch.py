"""The worker's copy of every live request, and the tensors of one step made from it.

Owns token ids (prompt, then whatever the worker itself sampled), block tables, and their packing into a `BatchLayout`.
Must not know the model, the sampler's rules or why a chunk was scheduled. Letters: T rows of a step, S block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headstart.core.request import SamplingParams
from headstart.core.step import NewRequestData, ScheduledChunk
from headstart.ops.batch import BatchLayout, ChunkSpan
from headstart.worker.sampling_state import SamplingState

IntArray = npt.NDArray[np.int64]


class GrowingArray:
    """An int64 array that is appended to, in amortised constant time; `array` is a view of its current content."""

    __slots__ = ("_buffer", "size")

    def __init__(self, values: Sequence[int], spare: int) -> None:
        self.size = len(values)
        self._buffer: IntArray = np.empty(self.size + spare, dtype=np.int64)
        self._buffer[: self.size] = values

    @property
    def array(self) -> IntArray:
        return self._buffer[: self.size]

    def replace_from(self, offset: int, values: Sequence[int]) -> None:
        """Content becomes `array[:offset]` followed by `values`."""
        assert 0 <= offset <= self.size, (offset, self.size)
        self.size = offset + len(values)
        if self.size > len(self._buffer):
            larger = np.empty(2 * self.size, dtype=np.int64)
            larger[:offset] = self._buffer[:offset]
            self._buffer = larger
        self._buffer[offset : self.size] = values


class RequestState:
    """One request. `error`, once set, is the answer to every later chunk of it: nothing more is computed for it."""

    __slots__ = ("block_table", "error", "num_prompt_tokens", "params", "request_id", "sampling", "tokens")

    def __init__(self, new: NewRequestData, vocab_size: int) -> None:
        self.request_id = new.request_id
        self.params = new.params
        self.num_prompt_tokens = len(new.prompt_token_ids)
        self.tokens = GrowingArray(new.prompt_token_ids, spare=min(new.params.max_tokens + 1, 1024))
        self.block_table = GrowingArray((), spare=8)
        self.error = _outside_vocabulary(self.tokens.array, new.params, vocab_size)
        self.sampling = SamplingState(new.params, self.tokens.array)

    def append(self, token_id: int) -> None:
        """A token was sampled."""
        self.tokens.replace_from(self.tokens.size, (token_id,))


def _outside_vocabulary(prompt: IntArray, params: SamplingParams, vocab_size: int) -> str | None:
    """Why these ids cannot be computed. The server refuses them; one that gets here must not end the worker."""
    ids = np.concatenate([prompt, np.array([token for token, _ in params.logit_bias], dtype=np.int64)])
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    return f"token id {outside[0]} is outside the vocabulary (0 to {vocab_size - 1})" if len(outside) else None


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one forward pass reads."""

    token_ids: Tensor  # [T] int64
    layout: BatchLayout


class InputBatch:
    """All requests that the worker knows: from the step that brings one to the step that says it is finished."""

    def __init__(self, block_size: int, *, num_blocks: int, vocab_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._device = device
        self._requests: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, new: NewRequestData) -> None:
        assert new.request_id not in self._requests, f"request {new.request_id} is known already"
        assert new.prompt_token_ids, f"request {new.request_id} has no prompt"
        self._requests[new.request_id] = RequestState(new, self._vocab_size)

    def remove(self, request_id: str) -> None:
        """Forget a request. One that ended before any step named it is unknown here, and that is fine."""
        self._requests.pop(request_id, None)

    def clear(self) -> None:
        self._requests.clear()

    def update(self, chunk: ScheduledChunk) -> RequestState:
        """Take over a chunk's blocks; returns its request."""
        # Our kernels write where they are told to: an id outside the pool must not get there.
        assert all(0 <= block < self._num_blocks for block in chunk.block_ids), f"{chunk}: the pool ends before"
        state = self._requests[chunk.request_id]
        state.block_table.replace_from(chunk.block_offset, chunk.block_ids)
        return state

    def build(self, chunks: Sequence[ScheduledChunk], states: Sequence[RequestState]) -> StepInput:
        """The tensors of a step that computes `chunks` (of `states`, pairwise), rows in the order of the chunks.

        A few numpy calls a chunk, none a token; one copy to the device.
        """
        size = self._block_size
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        counts = np.array([chunk.num_scheduled_tokens for chunk in chunks], dtype=np.int64)
        contexts = starts + counts
        num_blocks = -(-contexts // size)
        _check(chunks, states, contexts, num_blocks)
        first_rows = np.cumsum(counts) - counts
        first_blocks = np.cumsum(num_blocks) - num_blocks

        token_ids = np.concatenate(
            [state.tokens.array[start:end] for state, start, end in zip(states, starts, contexts, strict=True)]
        )
        tables = np.concatenate(
            [state.block_table.array[:count] for state, count in zip(states, num_blocks, strict=True)]
        )
        positions = np.arange(len(token_ids), dtype=np.int64) + np.repeat(starts - first_rows, counts)
        slots = tables[np.repeat(first_blocks, counts) + positions // size] * size + positions % size

        packed = torch.from_numpy(np.concatenate([token_ids, positions, slots, tables])).to(self._device)
        rows = len(token_ids)
        spans = tuple(
            ChunkSpan(first_row, count, context, table)
            for first_row, count, context, table in zip(
                first_rows.tolist(),
                counts.tolist(),
                contexts.tolist(),
                packed[3 * rows :].split(num_blocks.tolist()),
                strict=True,
            )
        )
        layout = BatchLayout(positions=packed[rows : 2 * rows], slot_mapping=packed[2 * rows : 3 * rows], spans=spans)
        return StepInput(token_ids=packed[:rows], layout=layout)


def _check(
    chunks: Sequence[ScheduledChunk], states: Sequence[RequestState], contexts: IntArray, num_blocks: IntArray
) -> None:
    """What the scheduler promises: known tokens, enough blocks, and samples only at a request's end."""
    for chunk, state, context, blocks in zip(chunks, states, contexts, num_blocks, strict=True):
        known = state.tokens.size
        assert 0 <= chunk.start < context <= known, f"{chunk} reaches past the {known} tokens known"
        assert blocks <= state.block_table.size, f"{chunk} needs {blocks} blocks and has {state.block_table.size}"
        assert not chunk.samples or context == known, f"{chunk} samples, but not at the last of {known} tokens"
