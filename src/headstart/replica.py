"""The composition root of an engine process (`python -m headstart.replica FD`): makes the worker. Imports torch.

Started by `headstart.launch`; also what the offline `LLM` is made of.
"""

from __future__ import annotations

import itertools
import logging
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from headstart.perf.openmp import spin_briefly

spin_briefly(os.environ)  # torch is imported below

from headstart.config import Config  # noqa: E402
from headstart.core.cost import CostModel, StepWork  # noqa: E402
from headstart.core.engine_core import EngineCore  # noqa: E402
from headstart.engine.child import BuiltEngine, run_child  # noqa: E402
from headstart.engine.ipc import EngineInfo  # noqa: E402
from headstart.engine.step_log import StepLog  # noqa: E402
from headstart.executor.base import Executor, ExecutorInfo, StartupError  # noqa: E402
from headstart.executor.local import LocalExecutor  # noqa: E402
from headstart.executor.timed import timed_steps  # noqa: E402
from headstart.hub import ModelError, ModelFiles, Progress  # noqa: E402
from headstart.hub.cache import cache_folder  # noqa: E402
from headstart.launch import decode_setup, settle_config  # noqa: E402
from headstart.perf.cost_store import CostKey, CostStore, KeptCostModel  # noqa: E402
from headstart.perf.model_spec import ModelSpec  # noqa: E402
from headstart.perf.priority import give_way  # noqa: E402
from headstart.perf.roofline import cpu_device, cuda_device, roofline  # noqa: E402
from headstart.worker.sweep import SweepLimits, sweep_steps  # noqa: E402
from headstart.worker.worker import Worker  # noqa: E402

_LONGEST = 1.25  # of a sweep's steps, in terms of the longest that the scheduler means to make
_KEEPING_SECONDS = 8.0  # of a shutdown, for what the cache holds to be kept by a tier
_FIRST_STEPS, _FIRST_SECONDS = 48, 1.5  # of the sweep at a first start


def build_engine(config: Config, files: ModelFiles, spec: ModelSpec, progress: Progress | None = None) -> BuiltEngine:
    """Load the model, warm it up, and wire a core to it. Raises `StartupError` with one line that says what to do."""
    config = settle_config(config, spec)
    worker = Worker(config, files, spec)
    executor, started, max_model_len = start_executor(config, worker, progress)
    costs = make_costs(config, files, spec, started)
    if not costs.was_known:
        learn_first_costs(config, executor, started, max_model_len, costs)
    core = EngineCore(
        config.scheduler,
        costs,
        num_blocks=started.num_blocks,
        block_size=started.block_size,
        max_model_len=max_model_len,
        prefix_cache=config.cache.prefix_cache,
        connector=worker.tiers,
    )
    info = EngineInfo(
        max_model_len=max_model_len,
        num_blocks=started.num_blocks,
        block_size=started.block_size,
        vocab_size=started.vocab_size,
        prefix_cache=config.cache.prefix_cache,
        summary=started.summary,
    )

    def end() -> None:
        costs.save()
        if worker.tiers is not None:
            worker.tiers.keep(core.cached_blocks(), _KEEPING_SECONDS)
            worker.tiers.close()

    return BuiltEngine(core, executor, info, config.scheduler.step_timeout_s, source=worker.tiers, on_end=end)


def start_executor(
    config: Config, worker: Worker, progress: Progress | None
) -> tuple[LocalExecutor, ExecutorInfo, int]:
    """Load the model and warm it up. Also what came of that, and the context that is served, in tokens."""
    executor = LocalExecutor(worker, progress)
    try:
        started = executor.start()
        return executor, started, settle_max_model_len(config.model.max_model_len, started)
    except ModelError as error:
        executor.shutdown()
        raise StartupError(str(error)) from error
    except BaseException:
        executor.shutdown()
        raise


def sweep(
    config: Config,
    executor: Executor,
    started: ExecutorInfo,
    max_model_len: int,
    costs: CostModel,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[StepWork, float]]:
    """Steps of all kinds, without end, and the seconds that they took. `costs` hears of them too, and says which would
    take longer than any that the scheduler makes."""
    scheduler = config.scheduler
    longest = _LONGEST * max(scheduler.max_chunk_ms, scheduler.slo_tpot_ms) / 1000
    limits = SweepLimits(
        num_blocks=started.num_blocks,
        block_size=started.block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
    )
    steps = sweep_steps(limits, random.Random(0), lambda work: costs.step_seconds(work) <= longest)
    for work, seconds in timed_steps(executor, steps, clock):
        costs.observe(work, seconds)
        yield work, seconds


def learn_first_costs(
    config: Config, executor: Executor, started: ExecutorInfo, max_model_len: int, costs: CostModel
) -> None:
    """A first start: a second or so of steps, so that the first predictions are no guesses.

    `costs` just hears of them: a fit to so few would be worse than what it made of its prior.
    """
    end = time.monotonic() + _FIRST_SECONDS
    for _ in itertools.islice(sweep(config, executor, started, max_model_len, costs), _FIRST_STEPS):
        if time.monotonic() >= end:
            return


def make_costs(config: Config, files: ModelFiles, spec: ModelSpec, started: ExecutorInfo) -> KeptCostModel:
    """What was learned of this model on this machine, or else what their shapes and rates say."""
    on_cpu = config.model.device == "cpu"
    device = cpu_device(started.threads) if on_cpu else cuda_device(config.model.device)
    prior = roofline(spec, device, weight_bytes=started.num_weight_bytes, kv_bytes_per_token=started.kv_bytes_per_token)
    key = CostKey(
        model=f"{files.name} {started.num_weight_bytes}",
        device=f"{device.name} {platform.machine()}",
        formats=started.formats,
        block_size=started.block_size,
        threads=started.threads,
    )
    return KeptCostModel(prior, CostStore(cache_folder() / "costs"), key)


def settle_max_model_len(wanted: int | None, started: ExecutorInfo) -> int:
    """The context that is served, in tokens: what was asked for, else what the model and the KV pool both hold."""
    num_kv_tokens = started.num_blocks * started.block_size
    if wanted is None:
        return min(started.max_model_len, num_kv_tokens)
    if wanted > started.max_model_len:
        raise StartupError(f"max_model_len is {wanted}, but the model's context is {started.max_model_len} tokens")
    if wanted > num_kv_tokens:
        raise StartupError(
            f"max_model_len is {wanted}, but the KV pool holds {num_kv_tokens} tokens; "
            f"lower max_model_len or raise kv_cache_memory"
        )
    return wanted


def _build(payload: bytes, progress: Progress) -> BuiltEngine:
    setup = decode_setup(payload)
    server = setup.config.server
    logging.getLogger().setLevel(server.log_level.upper())
    log = None if server.step_log is None else StepLog(Path(server.step_log).expanduser())
    engine = build_engine(setup.config, setup.files, setup.spec, progress)
    return engine if log is None else _with_log(engine, log)


def _with_log(engine: BuiltEngine, log: StepLog) -> BuiltEngine:
    def end() -> None:
        engine.on_end()
        log.close()

    return replace(engine, on_events=log.observe, on_end=end)


def main(arguments: list[str]) -> int:
    give_way()
    logging.basicConfig(format="%(asctime)s %(levelname)s engine: %(message)s")
    return run_child(int(arguments[0]), _build)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(exit_code)  # at once: the interpreter takes its time to take torch apart
