"""The executor protocol: what the engine loop asks of whatever computes a step. Never imports torch."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from headstart.core.step import ModelOutput, SchedulerOutput


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What `start` settled. `summary` is the human-readable half of the start-up line (device, dtype, memory).

    `num_weight_bytes` and `kv_bytes_per_token`, over all layers, are as they are held; `formats` says in which formats.
    """

    num_blocks: int
    block_size: int
    max_model_len: int  # the model's context; the caller lowers it to what the pool holds
    vocab_size: int
    summary: str
    num_weight_bytes: int = 0
    kv_bytes_per_token: float = 0.0
    formats: str = ""
    threads: int = 1


class Executor(Protocol):
    """Runs steps in order. One owner: the engine loop's thread."""

    def start(self) -> ExecutorInfo:
        """Load the weights, make the KV pool, run a real forward pass of each shape class. Raises `StartupError`."""
        ...

    def submit(self, step: SchedulerOutput) -> Future[ModelOutput]:
        """Queue one step. Futures complete in the order of submission; a failed future means the executor is lost."""
        ...

    def shutdown(self) -> None:
        """Stop after the step that runs now. Safe to call twice."""
        ...


class StartupError(RuntimeError):
    """The model cannot be served (damaged file, unsupported tensor, too little memory). One line, says what to do."""
