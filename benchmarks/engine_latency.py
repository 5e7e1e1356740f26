"""How soon the API process is answered while the engine computes on all cores, by the compute threads' niceness.

    python benchmarks/engine_latency.py [--seconds 20] [--threads N]

Each engine runs steps that multiply matrices on all cores without a pause, for one request at a time. Meanwhile, in
the API process: `ping` is the round trip to the engine's loop thread and back; `wake` is by how much a 5 ms timer of
the event loop is late; `encode` is what 1 ms of this process' own Python work takes. The engines take turns, so that
what else the machine does hits all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from _verdict import machine_line, run_main

from headstart.config import SchedulerConfig
from headstart.core.cost import LinearCosts
from headstart.core.engine_core import EngineCore
from headstart.core.request import EngineRequest, SamplingParams
from headstart.core.step import ChunkOutput, ModelOutput, SchedulerOutput
from headstart.engine import AsyncEngine, EngineInfo, EngineLimits
from headstart.engine.child import BuiltEngine, run_child
from headstart.engine.process import EngineProcess
from headstart.executor.base import ExecutorInfo
from headstart.executor.local import LocalExecutor
from headstart.hub import Progress

INFO = EngineInfo(4096, 1024, 16, 1000, True, "multiplies matrices")
SELF = str(Path(__file__).resolve())
NICE = (0, 5, 19)
ROUNDS = 4


class BusyWorker:
    """Every step multiplies matrices for some 50 ms on all threads, which are as nice as told."""

    def __init__(self, torch: Any, threads: int, nice: int) -> None:
        self._torch = torch
        self._threads = threads
        self._nice = nice

    def start(self, progress: Any) -> ExecutorInfo:
        # On Linux each thread has its own; the compute threads are started by this one and take it over.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        self._torch.set_num_threads(self._threads)
        self._a = self._torch.randn(512, 576)
        self._b = self._torch.randn(576, 1536)
        return ExecutorInfo(INFO.num_blocks, INFO.block_size, INFO.max_model_len, INFO.vocab_size, INFO.summary)

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            self._a @ self._b
        chunks = tuple(ChunkOutput(chunk.request_id, (1,) if chunk.samples else ()) for chunk in step.chunks)
        return ModelOutput(step.step_id, chunks)


def build(payload: bytes, progress: Progress) -> BuiltEngine:
    import torch

    nice, threads = (int(part) for part in payload.split())
    executor = LocalExecutor(BusyWorker(torch, threads, nice))
    executor.start()
    core = EngineCore(
        SchedulerConfig(),
        LinearCosts(),
        num_blocks=INFO.num_blocks,
        block_size=16,
        max_model_len=4096,
        prefix_cache=True,
    )
    return BuiltEngine(core, executor, INFO)


async def measure(engine: AsyncEngine, seconds: float, number: int) -> dict[str, list[float]]:
    """Milliseconds of each kind while one request is being computed."""
    times: dict[str, list[float]] = {"ping": [], "wake": [], "encode": [], "step": []}
    request = EngineRequest(f"r{number}", (1, 2), SamplingParams(max_tokens=4000), time.monotonic())
    stream = engine.generate(request)
    await anext(stream)
    before = await engine.ping()
    started = end = time.perf_counter()
    while end - started < seconds:
        begin = time.perf_counter()
        await engine.ping()
        pinged = time.perf_counter()
        await asyncio.sleep(0.005)
        woken = time.perf_counter()
        sum(range(25_000))  # about 1 ms or less
        end = time.perf_counter()
        times["ping"].append(1e3 * (pinged - begin))
        times["wake"].append(1e3 * (woken - pinged - 0.005))
        times["encode"].append(1e3 * (end - woken))
    steps = (await engine.ping()).steps - before.steps
    times["step"].append(1e3 * (end - started) / max(1, steps))
    await stream.aclose()
    return times


async def compare(seconds: float, threads: int) -> None:
    engines: dict[int, AsyncEngine] = {}
    results: dict[int, dict[str, list[float]]] = {nice: {} for nice in NICE}
    try:
        for nice in NICE:
            process = EngineProcess([sys.executable, SELF], f"{nice} {threads}".encode())
            engines[nice] = AsyncEngine(process, EngineLimits(10, 10))
            await engines[nice].wait_ready()
        for number in range(ROUNDS):
            for nice, engine in engines.items():
                for kind, values in (await measure(engine, seconds / ROUNDS, number)).items():
                    results[nice].setdefault(kind, []).extend(values)
    finally:
        await asyncio.gather(*(engine.shutdown() for engine in engines.values()))
    print(machine_line())
    report(results)


def report(results: dict[int, dict[str, list[float]]]) -> None:
    print(
        f"{'nice':>4}  " + "  ".join(f"{kind + ' p50 p90 p99':>24}" for kind in ("ping", "wake", "encode")) + "  step"
    )
    for nice, kinds in results.items():
        cells = []
        for kind in ("ping", "wake", "encode"):
            cuts = statistics.quantiles(kinds[kind], n=100)
            cells.append(f"{cuts[49]:>10.2f} {cuts[89]:>6.2f} {cuts[98]:>6.2f}")
        print(f"{nice:>4}  " + "  ".join(cells) + f"  {statistics.median(kinds['step']):.1f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring for each niceness")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    asyncio.run(compare(arguments.seconds, arguments.threads))
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].isdigit():  # started by EngineProcess
        sys.exit(run_child(int(sys.argv[1]), build))
    sys.exit(run_main(main))
