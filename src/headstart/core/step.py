"""What crosses between the scheduler and the worker in one step. Frozen; everything a worker may know of the core.

Steps are in order: a worker executes step n completely before step n+1. Tokens that the scheduler does not know yet
(sampled by a step in flight) are known to the worker, which appends what it samples to its own copy of the request.
Once a chunk of a request failed (`ChunkOutput.error`), its chunks in later steps that were already in flight fail too.

What is made for each request in each step is a `NamedTuple`: five times cheaper to make than a frozen dataclass, and
making them is half the cost of scheduling 64 decodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headstart.core.request import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """Sent once, with the first step that names the request. After preemption the worker still knows it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


class ScheduledChunk(NamedTuple):
    """Compute tokens `[start, start + num_scheduled_tokens)` of one request; the context ends with the last of them.

    `block_ids` replace the worker's block table from entry `block_offset` on (offset 0: the whole table anew).
    `samples`: the chunk ends at the request's last known-or-pending token, so its last row yields the next token.
    """

    request_id: str
    start: int
    num_scheduled_tokens: int
    block_offset: int
    block_ids: tuple[int, ...]
    samples: bool


class BlockSave(NamedTuple):
    """A block that left the prefix cache: it is copied, before anything else in the step, for whoever keeps such.

    `name` says which prefix it ends (`core.chain`).
    """

    block_id: int
    name: bytes


class BlockFill(NamedTuple):
    """Blocks that a load has staged go into these blocks, in order (-1: that one is not needed).

    The step's own chunks may read them; of each layer they are there before that layer computes.
    """

    load_id: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. `chunks` may be empty only when `finished_request_ids` is not: the worker then just forgets those."""

    step_id: int
    new_requests: tuple[NewRequestData, ...]
    chunks: tuple[ScheduledChunk, ...]
    finished_request_ids: tuple[str, ...]
    saves: tuple[BlockSave, ...] = ()
    fills: tuple[BlockFill, ...] = ()

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(chunk.num_scheduled_tokens for chunk in self.chunks)


class TokenLogprob(NamedTuple):
    """Natural-log probability of one token, its rank (1 = most likely) and the best alternatives as `(id, logprob)`.

    Taken from the raw logits (before temperature, penalties and filters), as OpenAI's API reports them.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class ChunkOutput(NamedTuple):
    """Result of one chunk. `token_ids` is empty when the chunk does not sample.

    `prompt_logprobs`: for requests with `params.prompt_logprobs`, one entry for each *prompt* token
    `start + 1 .. start + num_scheduled_tokens` that exists (the row of token i predicts token i + 1).
    `error`: the request could not be computed (for example non-finite logits); it is finished with that message.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Result of one step, chunks in the step's order. `sample_seconds`: time spent on logits and sampling."""

    step_id: int
    chunks: tuple[ChunkOutput, ...]
    sample_seconds: float = 0.0


class RequestOutput(NamedTuple):
    """News of one request for its caller. The last has a `finish_reason`; `stop_token_id` says which token ended it.

    `token_ids` never holds the stop token's id: a stop token ends the text and is no part of it.
    `ledger` comes once, with the first token: seconds by part, in the order of design section 5; so does
    `predicted_ttft`: what was said, when it was added, of the seconds from its arrival to now.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int = 0  # sampled so far, a final stop token included
    num_preemptions: int = 0
    time: float = 0.0  # monotonic seconds at which the step that made it retired
    ledger: tuple[tuple[str, float], ...] = ()
    predicted_ttft: float = 0.0
