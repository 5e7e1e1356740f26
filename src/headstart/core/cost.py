"""What a step costs: the work in it as numbers, and the protocol of whatever turns work into seconds.

The scheduler sizes chunks with it, policies order by it, admission promises with it, the simulator runs on it. The
model that is fitted to real steps lives in `headstart.perf`; `LinearCosts` is one that never learns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class StepWork(NamedTuple):
    """What one step computes. A token at position p attends to a context of p + 1 tokens.

    `prefill_context` and `decode_context` are sums of these contexts over the tokens of prefill chunks and of decodes.
    `num_samples`: rows that see the LM head and the sampler, decodes included.
    """

    num_prefill_tokens: int = 0
    num_prefills: int = 0
    prefill_context: float = 0.0
    num_decodes: int = 0
    decode_context: float = 0.0
    num_samples: int = 0

    def with_prefill(self, start: int, count: int, samples: bool) -> StepWork:
        """The same step with one more chunk: tokens `[start, start + count)`."""
        return StepWork(
            self.num_prefill_tokens + count,
            self.num_prefills + 1,
            self.prefill_context + context_of(start, count),
            self.num_decodes,
            self.decode_context,
            self.num_samples + samples,
        )


class CostModel(Protocol):
    """Seconds for work. Predictions are finite, never negative, and never fall when any number of the work grows."""

    def step_seconds(self, work: StepWork) -> float:
        """How long a step with this work takes, from its begin to its retirement."""
        ...

    def prefill_seconds(self, start: int, count: int) -> float:
        """What computing tokens `[start, start + count)` adds to the steps that they are computed in; 0 for none."""
        ...

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step with this work really took that long. Whatever is observed, predictions keep their promises."""
        ...


def context_of(start: int, count: int) -> float:
    """Sum of the contexts of tokens `[start, start + count)`."""
    return count * start + count * (count + 1) / 2


@dataclass(frozen=True, slots=True)
class LinearCosts:
    """A cost model that never learns. Seconds: a step, a prefill token, a token of its context, a decode, a sample."""

    step: float = 0.0
    prefill_token: float = 0.0
    prefill_context: float = 0.0
    decode: float = 0.0
    decode_context: float = 0.0
    sample: float = 0.0

    def step_seconds(self, work: StepWork) -> float:
        return (
            self.step
            + work.num_prefill_tokens * self.prefill_token
            + work.prefill_context * self.prefill_context
            + work.num_decodes * self.decode
            + work.decode_context * self.decode_context
            + work.num_samples * self.sample
        )

    def prefill_seconds(self, start: int, count: int) -> float:
        return count * self.prefill_token + context_of(start, count) * self.prefill_context

    def observe(self, work: StepWork, seconds: float) -> None:
        """Costs are what they were said to be."""
