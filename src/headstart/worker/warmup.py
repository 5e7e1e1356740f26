"""Warm-up: steps that touch every shape class before the first client comes.

Owns which shapes those are; knows no torch. A first run of a shape pays once for memory, code generation and thread
pools; a client must not. The steps go through the same `execute` as real ones and end with their requests finished.

Starting is waited for too, so there are few steps, each of which touches several classes: a full chunk behind a
context, over scattered blocks; decodes beside a chunk; decodes alone. Contexts are not computed first: the chunks begin
behind tokens that count as cached, and the empty pool's zeros are as good as any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headstart.core.request import SamplingParams
from headstart.core.step import SchedulerOutput
from headstart.worker.stage import Player, Stage

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
    stage = Stage(num_blocks, block_size, max_model_len)
    yield from _long_request(stage, max_chunk)
    yield from _short_requests(stage, mixed_chunk, max_num_seqs)


def _long_request(stage: Stage, max_chunk: int) -> Iterator[SchedulerOutput]:
    """A full chunk whose context is longer than one, then a decode at its end; no block follows its neighbour."""
    request = stage.deal("long", 2 * max_chunk, spare=1, params=_GREEDY)
    assert request is not None, "the pool must hold a prompt and its answer"
    request.blocks = request.blocks[::-1]
    yield stage.step([(request, min(max_chunk, request.num_tokens))])
    yield stage.step([(request, 1)])
    yield stage.end()


def _short_requests(stage: Stage, mixed_chunk: int, max_num_seqs: int) -> Iterator[SchedulerOutput]:
    """Decodes beside a chunk, then decodes alone, in smaller and smaller batches."""
    batches = sorted({min(batch, max_num_seqs) for batch in _DECODE_BATCHES}, reverse=True)
    cast: list[Player] = []
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
