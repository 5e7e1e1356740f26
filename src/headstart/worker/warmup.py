"""Warm-up: steps that touch every shape class before the first client comes.

Owns which shapes those are; knows no torch. A first run of a shape pays once for memory, code generation and thread
pools; a client must not. The steps go through the same `execute` as real ones and end with their requests finished.

Starting is waited for too, so there are few steps, each of which touches several classes: a full chunk behind a
context, over scattered blocks; decodes beside a chunk; decodes alone. Contexts are not computed first: the chunks begin
behind tokens that count as cached, and the empty pool's zeros are as good as any.
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
_ASKS_ABOUT_PROMPT = replace(_GREEDY, prompt_logprobs=4)
_BESIDE_A_CHUNK = 8  # decodes in the mixed step
_DECODE_BATCHES = (32, 8, 2)  # one alone is the long request's
_SHORT = 2  # tokens: one that counts as cached, and one to compute


def warmup_steps(
    *, num_blocks: int, block_size: int, max_model_len: int, max_chunk: int, mixed_chunk: int, max_num_seqs: int
) -> Iterator[SchedulerOutput]:
    """Steps to execute in order: a prefill of `max_chunk` tokens, decode batches, a mixed step; all kinds of sampling.

    `max_chunk` and `mixed_chunk` are the most tokens that a step without and with decodes computes. Whatever does not
    fit into the pool is made smaller or left out; the smallest pool still gets a prefill and a decode.
    """
    stage = _Stage(num_blocks, block_size, max_model_len)
    yield from _long_request(stage, max_chunk)
    yield from _short_requests(stage, mixed_chunk, max_num_seqs)


def _long_request(stage: _Stage, max_chunk: int) -> Iterator[SchedulerOutput]:
    """A full chunk whose context is longer than one, then a decode at its end; no block follows its neighbour."""
    request = stage.deal("long", 2 * max_chunk, spare=1, params=_GREEDY)
    assert request is not None, "the pool must hold a prompt and its answer"
    request.blocks = request.blocks[::-1]
    yield stage.step([(request, min(max_chunk, request.num_tokens))])
    yield stage.step([(request, 1)])
    yield stage.end()


def _short_requests(stage: _Stage, mixed_chunk: int, max_num_seqs: int) -> Iterator[SchedulerOutput]:
    """Decodes beside a chunk, then decodes alone, in smaller and smaller batches."""
    batches = sorted({min(batch, max_num_seqs) for batch in _DECODE_BATCHES}, reverse=True)
    cast: list[_Player] = []
    for index in range(batches[0]):
        player = stage.deal(f"short {index}", _SHORT, spare=1 + len(batches), params=_KINDS[index % len(_KINDS)])
        if player is not None:
            cast.append(player)
    if not cast:
        return
    early = cast[:_BESIDE_A_CHUNK]
    asking = stage.deal("asking", _SHORT + 1, spare=0, params=_ASKS_ABOUT_PROMPT)
    late = stage.deal("late", max(1, mixed_chunk - len(early) - _SHORT - 1), spare=0, params=_GREEDY)
    more = [player for player in (asking, late) if player is not None]
    chunks = [*((player, 1) for player in early), *((player, player.num_tokens) for player in more)]
    yield stage.step(chunks)
    for batch in batches:
        some = [player for player in cast[:batch] if stage.has_room(player)]
        if some:
            yield stage.step([(player, 1) for player in some])
    yield stage.end()


@dataclass(slots=True)
class _Player:
    """A request of the warm-up. `num_tokens`: known so far, of which the last ones are computed next."""

    name: str
    num_tokens: int
    params: SamplingParams
    blocks: tuple[int, ...]


class _Stage:
    """The pool's blocks, dealt anew after each `end`, and the running number of steps."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._used = 0
        self._live: dict[str, None] = {}  # names, in order
        self._step_id = 0

    def deal(self, name: str, wanted: int, *, spare: int, params: SamplingParams) -> _Player | None:
        """A request with blocks for its prompt and `spare` tokens more; smaller where that does not fit, or None."""
        room = min((self._num_blocks - self._used) * self._block_size, self._max_model_len)
        num_tokens = min(wanted, room - 1)
        if num_tokens < 1:
            return None
        end = self._used - -min(num_tokens + max(spare, 1), room) // self._block_size
        player = _Player(name, num_tokens, params, tuple(range(self._used, end)))
        self._used = end
        return player

    def has_room(self, player: _Player) -> bool:
        return player.num_tokens <= min(len(player.blocks) * self._block_size, self._max_model_len)

    def step(self, chunks: Sequence[tuple[_Player, int]]) -> SchedulerOutput:
        """Compute the last `count` known tokens of each request and sample the next one."""
        new = [player for player, _ in chunks if player.name not in self._live]
        found = SchedulerOutput(
            step_id=self._next_id(),
            new_requests=tuple(NewRequestData(each.name, (0,) * each.num_tokens, each.params) for each in new),
            chunks=tuple(_chunk(player, count) for player, count in chunks),
            finished_request_ids=(),
        )
        self._live |= {player.name: None for player in new}
        for player, _ in chunks:
            player.num_tokens += 1
        return found

    def end(self) -> SchedulerOutput:
        """All requests are finished and all blocks free."""
        finished, self._live, self._used = tuple(self._live), {}, 0
        return SchedulerOutput(self._next_id(), (), (), finished)

    def _next_id(self) -> int:
        self._step_id += 1
        return self._step_id


def _chunk(player: _Player, count: int) -> ScheduledChunk:
    start = player.num_tokens - count
    return ScheduledChunk(player.name, start, count, block_offset=0, block_ids=player.blocks, samples=True)
