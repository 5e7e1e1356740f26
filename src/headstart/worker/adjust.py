"""Logit bias and penalties: what moves a row's logits before the choice. Touches only the tokens concerned.

Owns their definitions; knows neither how a token is then chosen nor what a step is. Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headstart.worker.sampling_state import SamplingState

_LARGEST = float(np.finfo(np.float32).max)


def adjust_logits(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Apply every request's logit bias and penalties to its row of `logits` [R, V] float32, in place.

    Order, as in vLLM: the bias is added; then for each token of prompt or output the repetition penalty divides a
    positive logit and multiplies a negative one (Keskar et al. 2019, as transformers does); then for each *output*
    token `frequency_penalty * count + presence_penalty` is subtracted (OpenAI's definition). Computed in float64; a
    result outside float32's finite range becomes its nearest finite number, so no setting makes a row non-finite.
    """
    _add_bias(logits, [(row, state) for row, state in enumerate(states) if len(state.bias_ids)])
    _penalise(logits, [(row, state) for row, state in enumerate(states) if state.counts is not None])


def _add_bias(logits: Tensor, rows: list[tuple[int, SamplingState]]) -> None:
    if not rows:
        return
    lengths = [len(state.bias_ids) for _, state in rows]
    where = _places(logits, rows, lengths, [state.bias_ids for _, state in rows])
    bias = _tensor(np.concatenate([state.bias_values for _, state in rows]), logits)
    _store(logits, where, logits[where].double() + bias)


def _penalise(logits: Tensor, rows: list[tuple[int, SamplingState]]) -> None:
    if not rows:
        return
    all_counts = [state.counts for _, state in rows if state.counts is not None]
    lengths = [len(counts.ids) for counts in all_counts]
    where = _places(logits, rows, lengths, [counts.ids for counts in all_counts])
    params = [state.params for _, state in rows]
    repetition = _spread(logits, lengths, [each.repetition_penalty for each in params])
    frequency = _spread(logits, lengths, [each.frequency_penalty for each in params])
    presence = _spread(logits, lengths, [each.presence_penalty for each in params])
    counts = _tensor(np.concatenate([each.counts for each in all_counts]), logits)
    values = logits[where].double()
    values = torch.where(values > 0, values / repetition, values * repetition)
    _store(logits, where, values - frequency * counts - presence * (counts > 0))


def _places(
    logits: Tensor, rows: list[tuple[int, SamplingState]], lengths: list[int], ids: list[np.ndarray]
) -> tuple[Tensor, Tensor]:
    """Indices of the entries of `logits` concerned: rows and token ids."""
    row_of_entry = np.repeat(np.array([row for row, _ in rows], dtype=np.int64), lengths)
    return _tensor(row_of_entry, logits), _tensor(np.concatenate(ids), logits)


def _spread(logits: Tensor, lengths: list[int], values: list[float]) -> Tensor:
    """A value for each request, repeated for each of its entries."""
    return _tensor(np.repeat(np.array(values, dtype=np.float64), lengths), logits)


def _store(logits: Tensor, where: tuple[Tensor, Tensor], values: Tensor) -> None:
    logits[where] = values.clamp_(-_LARGEST, _LARGEST).to(logits.dtype)


def _tensor(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)
