"""The sampler: one token for each row of logits, and its log-probability where the request asked for it.

Owns the order of the stages (check, adjust, choose, report) and which rows pay for which; the stages' definitions live
in `adjust`, `draw` and `logprobs`. Knows no blocks, no chunks and no model. Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.core.step import TokenLogprob
from headstart.worker.adjust import adjust_logits
from headstart.worker.draw import DrawParams, argmax, draw
from headstart.worker.logprobs import token_logprobs
from headstart.worker.sampling_state import SamplingState

NON_FINITE = "the model gave logits that are not finite numbers for this request"

# Rows drawn together hold about so many logits: on a CPU the float64 copies of one large row fill its cache.
_CPU_GROUP = 1 << 16
_GPU_GROUP = 1 << 24


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen for one row: a token, or `error` for a row that cannot be sampled from."""

    token_id: int = -1
    logprob: TokenLogprob | None = None
    error: str | None = None


class Sampler:
    """Chooses tokens. Keeps nothing between calls: all memory is in the requests' `SamplingState`."""

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
        """Choose the next token of each request; `logits` [R, V] float32 may be overwritten.

        The n-th token of a request depends on its parameters, its seed, n and its own logits only. Each state advances
        by its token, except in rows with non-finite logits, which come back with an error and unchanged state.
        """
        finite = finite_rows(logits)
        if not all(finite):
            return self._sample_finite(logits, states, finite)
        raw = self._raw_copy(logits, states)
        if any(state.changes_logits for state in states):
            adjust_logits(logits, states)
        token_ids = self._choose(logits, states)
        for state, token_id in zip(states, token_ids, strict=True):
            state.push(token_id)
        reports = self._report(raw, states, token_ids)
        return [Sampled(token_id, reports.get(row)) for row, token_id in enumerate(token_ids)]

    def _sample_finite(self, logits: Tensor, states: Sequence[SamplingState], finite: list[bool]) -> list[Sampled]:
        rows = [row for row, is_finite in enumerate(finite) if is_finite]
        results = [Sampled(error=NON_FINITE)] * len(states)
        if rows:
            sampled = self.sample(logits[rows], [states[row] for row in rows])
            for row, result in zip(rows, sampled, strict=True):
                results[row] = result
        return results

    def _raw_copy(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """The logits as the model gave them, for the logprobs: a copy only if some row of both kinds exists."""
        changed_and_reported = any(state.changes_logits and state.params.logprobs is not None for state in states)
        return logits.clone() if changed_and_reported else logits

    def _choose(self, logits: Tensor, states: Sequence[SamplingState]) -> list[int]:
        drawn = [row for row, state in enumerate(states) if not state.is_greedy]
        if not drawn:
            return argmax(logits).tolist()
        greedy = [row for row, state in enumerate(states) if state.is_greedy]
        token_ids = torch.empty(len(states), dtype=torch.int64, device=logits.device)
        if greedy:
            token_ids[greedy] = argmax(logits[greedy])
        for rows in _groups(drawn, logits):
            some = logits[rows[0] : rows[0] + 1] if len(rows) == 1 else logits[rows]
            token_ids[rows] = draw(some, [_draw_params(states[row]) for row in rows])
        return token_ids.tolist()

    def _report(self, raw: Tensor, states: Sequence[SamplingState], token_ids: list[int]) -> dict[int, TokenLogprob]:
        asked = [(row, state.params.logprobs) for row, state in enumerate(states)]
        rows = [row for row, count in asked if count is not None]
        counts = [count for _, count in asked if count is not None]
        if not rows:
            return {}
        reports = token_logprobs(raw[rows], [token_ids[row] for row in rows], counts)
        return dict(zip(rows, reports, strict=True))


def finite_rows(logits: Tensor) -> list[bool]:
    """Which rows of `logits` [R, V] hold finite numbers only."""
    suspects = (~torch.isfinite(logits.sum(dim=1))).tolist()  # one pass; a sum of finite numbers may overflow, though
    return [not suspect or bool(torch.isfinite(logits[row]).all()) for row, suspect in enumerate(suspects)]


def _groups(rows: list[int], logits: Tensor) -> Iterator[list[int]]:
    budget = _CPU_GROUP if logits.device.type == "cpu" else _GPU_GROUP
    size = max(1, budget // logits.shape[1])
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _draw_params(state: SamplingState) -> DrawParams:
    params = state.params
    return DrawParams(state.next_uniform(), params.temperature, params.top_k, params.top_p, params.min_p)
