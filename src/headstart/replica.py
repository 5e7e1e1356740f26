"""The composition root of an engine process (`python -m headstart.replica FD`): makes the worker. Imports torch.

Started by `headstart.launch`; also what the offline `LLM` is made of.
"""

from __future__ import annotations

import logging
import os
import platform
import sys

from headstart.perf.openmp import spin_briefly

spin_briefly(os.environ)  # torch is imported below

from headstart.config import Config  # noqa: E402
from headstart.core.engine_core import EngineCore  # noqa: E402
from headstart.engine.child import BuiltEngine, run_child  # noqa: E402
from headstart.engine.ipc import EngineInfo  # noqa: E402
from headstart.executor.base import ExecutorInfo, StartupError  # noqa: E402
from headstart.executor.local import LocalExecutor  # noqa: E402
from headstart.hub import ModelError, ModelFiles, Progress  # noqa: E402
from headstart.hub.cache import cache_folder  # noqa: E402
from headstart.launch import decode_setup, settle_config  # noqa: E402
from headstart.perf.cost_store import CostKey, CostStore, KeptCostModel  # noqa: E402
from headstart.perf.model_spec import ModelSpec  # noqa: E402
from headstart.perf.priority import give_way  # noqa: E402
from headstart.perf.roofline import cpu_device, cuda_device, roofline  # noqa: E402
from headstart.worker.worker import Worker  # noqa: E402


def build_engine(config: Config, files: ModelFiles, spec: ModelSpec, progress: Progress | None = None) -> BuiltEngine:
    """Load the model, warm it up, and wire a core to it. Raises `StartupError` with one line that says what to do."""
    config = settle_config(config, spec)
    executor = LocalExecutor(Worker(config, files, spec), progress)
    try:
        started = executor.start()
        max_model_len = settle_max_model_len(config.model.max_model_len, started)
    except ModelError as error:
        executor.shutdown()
        raise StartupError(str(error)) from error
    except BaseException:
        executor.shutdown()
        raise
    costs = make_costs(config, files, spec, started)
    core = EngineCore(
        config.scheduler,
        costs,
        num_blocks=started.num_blocks,
        block_size=started.block_size,
        max_model_len=max_model_len,
        prefix_cache=config.cache.prefix_cache,
    )
    info = EngineInfo(
        max_model_len=max_model_len,
        num_blocks=started.num_blocks,
        block_size=started.block_size,
        vocab_size=started.vocab_size,
        prefix_cache=config.cache.prefix_cache,
        summary=started.summary,
    )
    return BuiltEngine(core, executor, info, config.scheduler.step_timeout_s, on_end=costs.save)


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
    logging.getLogger().setLevel(setup.config.server.log_level.upper())
    return build_engine(setup.config, setup.files, setup.spec, progress)


def main(arguments: list[str]) -> int:
    give_way()
    logging.basicConfig(format="%(asctime)s %(levelname)s engine: %(message)s")
    return run_child(int(arguments[0]), _build)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(exit_code)  # at once: the interpreter takes its time to take torch apart
