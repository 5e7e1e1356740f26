"""A little scheduler for tests: makes `SchedulerOutput`s of chosen shape and collects what comes out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from headstart.core.request import SamplingParams
from headstart.core.step import ChunkOutput, ModelOutput, NewRequestData, ScheduledChunk, SchedulerOutput

GREEDY = SamplingParams(max_tokens=256, temperature=0.0)


@dataclass
class Job:
    """One request, and what is known of it: `length` counts tokens still in flight, too."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams = GREEDY
    computed: int = 0
    length: int = 0
    blocks: list[int] = field(default_factory=list)
    sent: int = 0  # blocks that the worker knows
    known: bool = False
    token_ids: list[int] = field(default_factory=list)
    outputs: list[ChunkOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.length = len(self.prompt)

    @property
    def done(self) -> bool:
        failed = any(output.error for output in self.outputs)
        return failed or self.length - len(self.prompt) >= self.params.max_tokens


class Driver:
    """Steps over jobs with blocks dealt in random order. `execute` is a worker's."""

    def __init__(
        self, execute: Callable[[SchedulerOutput], ModelOutput], num_blocks: int, block_size: int, seed: int = 0
    ) -> None:
        self._execute = execute
        self._block_size = block_size
        self.random = random.Random(seed)
        self.free = list(range(num_blocks))
        self.random.shuffle(self.free)
        self.step_id = 0
        self._finished: list[str] = []

    def step(self, *grants: tuple[Job, int]) -> SchedulerOutput:
        """Schedule up to so many tokens of each job; bookkeeping is done at once, as with steps in flight."""
        new, chunks = [], []
        for job, limit in grants:
            count = min(limit, job.length - job.computed)
            end = job.computed + count
            while len(job.blocks) * self._block_size < end:
                job.blocks.append(self.free.pop())
            if not job.known:
                new.append(NewRequestData(job.name, job.prompt, job.params))
                job.known = True
            samples = end == job.length
            chunks.append(
                ScheduledChunk(job.name, job.computed, count, job.sent, tuple(job.blocks[job.sent :]), samples)
            )
            job.sent, job.computed, job.length = len(job.blocks), end, job.length + samples
        self.step_id += 1
        finished, self._finished = tuple(self._finished), []
        return SchedulerOutput(self.step_id, tuple(new), tuple(chunks), finished)

    def run(self, *grants: tuple[Job, int]) -> ModelOutput:
        """Schedule, execute and collect."""
        return self.collect(self._execute(self.step(*grants)), [job for job, _ in grants])

    def collect(self, output: ModelOutput, jobs: list[Job]) -> ModelOutput:
        assert [chunk.request_id for chunk in output.chunks] == [job.name for job in jobs]
        for chunk, job in zip(output.chunks, jobs, strict=True):
            job.token_ids += chunk.token_ids
            job.outputs.append(chunk)
        return output

    def preempt(self, job: Job) -> None:
        """Take all blocks away; the job starts anew at token 0 with another table."""
        self.release(job)
        job.computed = 0

    def finish(self, job: Job) -> None:
        self.release(job)
        self._finished.append(job.name)

    def release(self, job: Job) -> None:
        self.free += job.blocks
        self.random.shuffle(self.free)
        job.blocks, job.sent = [], 0
