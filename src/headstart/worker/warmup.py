"""Warm-up: steps that touch every shape class before the first client comes.

Owns which shapes those are; knows no torch. A first run of a shape pays once for memory, code generation and thread
pools; a client must not. The steps go through the same `execute` as real ones and end with their requests finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from headstart.core.request import SamplingParams
from headstart.core.step import NewRequestData, ScheduledChunk, SchedulerOutput

_GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
_KINDS = (
    _GREEDY,
    replace(_GREEDY, temperature=1.0),
    replace(_GREEDY, temperature=0.7, top_k=40, min_p=0.01, repetition_penalty=1.1, logit_bias=((0, -1.0),)),
    replace(_GREEDY, temperature=0.7, top_p=0.9, presence_penalty=0.1, frequency_penalty=0.1, logprobs=4),
)
_CHUNK_SIZES = (64, 16, 1)
_DECODE_BATCHES = (1, 2, 4, 8)


def warmup_steps(
    *, num_blocks: int, block_size: int, max_model_len: int, max_chunk: int, mixed_chunk: int, max_num_seqs: int
) -> Iterator[SchedulerOutput]:
    """Steps to execute in order: prefills up to `max_chunk` tokens, decode batches, mixed ones; all kinds of sampling.

    `max_chunk` and `mixed_chunk` are the most tokens that a step without and with decodes computes. Whatever does not
    fit into the pool is made smaller or left out; the smallest pool still gets a prefill and a decode.
    """
    stage = _Stage(num_blocks, block_size, max_model_len)
    for size in sorted({max_chunk, mixed_chunk, *(size for size in _CHUNK_SIZES if size < max_chunk)}, reverse=True):
        yield from stage.play([(size, _GREEDY)], late_chunk=0)
    batches = sorted({min(batch, max_num_seqs) for batch in _DECODE_BATCHES})
    for batch in batches:
        kinds = [_KINDS[index % len(_KINDS)] for index in range(batch)]
        late_chunk = max(1, mixed_chunk - batch) if batch == batches[-1] else 0
        yield from stage.play([(1, kind) for kind in kinds], late_chunk)


class _Stage:
    """The pool's blocks, dealt anew to each scene, and the running number of steps."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        assert min(num_blocks * block_size, max_model_len) >= 2, "the pool must hold a prompt and its answer"
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._step_id = 0

    def play(self, requests: list[tuple[int, SamplingParams]], late_chunk: int) -> Iterator[SchedulerOutput]:
        """Prefill all prompts in one step; decode all in the next, which a prompt of `late_chunk` joins; finish."""
        cast = self._deal([*requests, (late_chunk, _GREEDY)] if late_chunk else requests)
        late = cast[len(requests) :]
        early = cast[: len(requests)]
        yield self._step(new=early, chunks=[_chunk(each, 0, each.num_tokens) for each in early])
        decodes = [_chunk(each, each.num_tokens, 1) for each in early]
        yield self._step(new=late, chunks=[*decodes, *(_chunk(each, 0, each.num_tokens) for each in late)])
        yield self._step(finished=cast)

    def _deal(self, requests: list[tuple[int, SamplingParams]]) -> list[_Player]:
        """Give each request its own blocks, for its prompt and one more token; what finds none is left out."""
        cast: list[_Player] = []
        used = 0
        for number, (wanted, params) in enumerate(requests):
            room = min((self._num_blocks - used) * self._block_size, self._max_model_len)
            num_tokens = min(wanted, room - 1)
            if num_tokens < 1:
                break
            end = used + -(-(num_tokens + 1) // self._block_size)
            cast.append(_Player(f"warm-up {number}", num_tokens, params, tuple(range(used, end))))
            used = end
        return cast

    def _step(
        self, new: Sequence[_Player] = (), chunks: Sequence[ScheduledChunk] = (), finished: Sequence[_Player] = ()
    ) -> SchedulerOutput:
        self._step_id += 1
        return SchedulerOutput(
            step_id=self._step_id,
            new_requests=tuple(NewRequestData(each.name, (0,) * each.num_tokens, each.params) for each in new),
            chunks=tuple(chunks),
            finished_request_ids=tuple(each.name for each in finished),
        )


@dataclass(frozen=True, slots=True)
class _Player:
    """A request of the warm-up."""

    name: str
    num_tokens: int
    params: SamplingParams
    blocks: tuple[int, ...]


def _chunk(player: _Player, start: int, count: int) -> ScheduledChunk:
    return ScheduledChunk(player.name, start, count, block_offset=0, block_ids=player.blocks, samples=True)
