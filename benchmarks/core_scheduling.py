"""What one scheduling step costs: the core alone, 64 requests running and 1,000 waiting, no model.

Two loads. `steady`: every step decodes 64 requests while 1,000 wait for a place. `churn`: about one request ends in
every step, and one that waited takes its place and has its prompt computed. Timed is what the engine loop pays a step:
`begin_step`, `finish_step` and `take_events`; making the hand-made result of the model is not. The bar is on CPU time,
which other processes on the machine stretch less than wall time; both are shown.

    python benchmarks/core_scheduling.py
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from _verdict import Bar, finish, run_main, show

from headstart.bench.stats import percentile
from headstart.config import SchedulerConfig
from headstart.core.cost import LinearCosts
from headstart.core.engine_core import EngineCore
from headstart.core.request import EngineRequest, SamplingParams
from headstart.core.step import ChunkOutput, ModelOutput, SchedulerOutput
from headstart.perf.garbage import freeze_garbage_collector

BAR_US = 300.0
NUM_RUNNING, NUM_WAITING = 64, 1000


@dataclass(frozen=True, slots=True)
class Case:
    """Lengths in tokens. `warm_steps`: until the load looks the same in every step."""

    policy: Literal["srpf", "fcfs"]
    load: Literal["steady", "churn"]
    num_steps: int

    @property
    def prompt_tokens(self) -> int:
        return 256 if self.load == "steady" else 48

    @property
    def warm_steps(self) -> int:
        return 400

    @property
    def output_tokens(self) -> int:
        return self.warm_steps + self.num_steps + 100 if self.load == "steady" else 64


class Load:
    """A core under load, with a model that always says token 7."""

    def __init__(self, case: Case) -> None:
        room = case.prompt_tokens + case.output_tokens + 1
        config = SchedulerConfig(policy=case.policy, max_num_seqs=NUM_RUNNING)
        self.core = EngineCore(
            config,
            LinearCosts(),
            num_blocks=NUM_RUNNING * (room // 16 + 2),
            block_size=16,
            max_model_len=room,
            prefix_cache=True,
        )
        self._case = case
        self._rng = random.Random(0)
        self._num_added = 0
        self._now = 0.0

    def top_up(self) -> None:
        """Requests until 1,000 wait."""
        for _ in range(NUM_WAITING - self.core.stats().num_waiting):
            self._num_added += 1
            prompt = tuple(self._rng.randrange(49_000) for _ in range(self._case.prompt_tokens))
            params = SamplingParams(max_tokens=self._case.output_tokens, temperature=0.0)
            self.core.add_request(EngineRequest(f"r{self._num_added}", prompt, params, self._now), self._now)

    def step(self) -> tuple[float, float]:
        """One step; returns the seconds that the core took: CPU, wall."""
        self._now += 0.03
        began = time.thread_time(), time.perf_counter()
        step = self.core.begin_step(self._now)
        begun = time.thread_time(), time.perf_counter()
        assert step is not None
        output = _model(step)
        finishing = time.thread_time(), time.perf_counter()
        self.core.finish_step(output, self._now + 0.02)
        self.core.take_events()
        ended = time.thread_time(), time.perf_counter()
        cpu, wall = (begun[i] - began[i] + ended[i] - finishing[i] for i in range(2))
        return cpu, wall


def _model(step: SchedulerOutput) -> ModelOutput:
    chunks = tuple(ChunkOutput(chunk.request_id, (7,) if chunk.samples else ()) for chunk in step.chunks)
    return ModelOutput(step.step_id, chunks)


@dataclass(frozen=True, slots=True)
class Measured:
    """Microseconds of each step, and how many requests ran on average."""

    cpu: list[float]
    wall: list[float]
    running: float


def measure(case: Case) -> Measured:
    load = Load(case)
    for _ in range(case.warm_steps):
        load.top_up()
        load.step()
    freeze_garbage_collector()  # as the engine process does once it is ready
    times, running = [], []
    for _ in range(case.num_steps):
        load.top_up()
        times.append(load.step())
        running.append(load.core.stats().num_running)
    gc.unfreeze()
    return Measured([cpu * 1e6 for cpu, _ in times], [wall * 1e6 for _, wall in times], statistics.fmean(running))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="steps a round (default 500)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds, interleaved; the median counts (default 9)")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args()
    policies: tuple[Literal["srpf", "fcfs"], ...] = ("srpf", "fcfs")
    loads: tuple[Literal["steady", "churn"], ...] = ("steady", "churn")
    cases = [Case(policy, load, args.steps) for policy in policies for load in loads]
    rounds = [{case: measure(case) for case in cases} for _ in range(args.rounds)]
    rows, results, bars = [], {}, []
    for case in cases:
        name = f"{case.policy} {case.load}"
        found = [of_round[case] for of_round in rounds]
        values = {
            "cpu_mean_us": statistics.median(statistics.fmean(each.cpu) for each in found),
            "cpu_p50_us": statistics.median(percentile(each.cpu, 0.5) for each in found),
            "cpu_p99_us": statistics.median(percentile(each.cpu, 0.99) for each in found),
            "wall_p50_us": statistics.median(percentile(each.wall, 0.5) for each in found),
            "running": statistics.fmean(each.running for each in found),
        }
        rows.append([name, *(f"{value:.0f}" for value in values.values())])
        results[name] = values
        bars.append(Bar(f"{name}, mean us a step", values["cpu_mean_us"], BAR_US, at_most=True))
    title = f"Core alone, us a step: up to {NUM_RUNNING} running, {NUM_WAITING} waiting"
    show(title, ("policy, load", "CPU mean", "p50", "p99", "wall p50", "running"), rows, bars)
    return finish(args.json, results, bars)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
