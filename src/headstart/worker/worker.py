"""The worker: a model, its KV pool and its runner, from the configuration to the first real step.

Owns start-up on this machine (threads, dtype, pool size, warm-up) and the settled configuration's summary. Knows
neither the scheduler nor the processes around it. All torch work runs in inference mode, in whatever thread calls.
"""

from __future__ import annotations

import torch

from headstart.config import Config, ConfigError
from headstart.core.step import ModelOutput, SchedulerOutput
from headstart.executor.base import ExecutorInfo, StartupError
from headstart.hub import ModelFiles, Progress
from headstart.kv.pool import KVPool
from headstart.kv.tiers import TierConnector, TierError
from headstart.models import Decoder, load_model
from headstart.ops import KVFormat, make_ops
from headstart.perf.model_spec import ModelSpec
from headstart.worker.memory import PoolRequest, free_memory, num_blocks
from headstart.worker.model_runner import ModelRunner
from headstart.worker.threads import usable_cores
from headstart.worker.tiers import make_tiers
from headstart.worker.warmup import warmup_steps

# Tokens of prefill in the warm-up's steps: buffers for longer ones are made when the first comes.
_WARM_CHUNK, _WARM_MIXED_CHUNK = 512, 128
_MIN_TOKENS = 2  # a prompt of one token and its answer


class Worker:
    """`start` once, then `execute` step by step. Not thread-safe: one caller at a time."""

    def __init__(self, config: Config, files: ModelFiles, spec: ModelSpec) -> None:
        self._config = config
        self._files = files
        self._spec = spec
        self._runner: ModelRunner | None = None
        self.pool: KVPool | None = None  # once started
        self.tiers: TierConnector | None = None  # where configured, once started

    @torch.inference_mode()
    def start(self, progress: Progress | None = None) -> ExecutorInfo:
        """Load the weights, make the KV pool, run every shape class once.

        Raises `StartupError` (too little memory, no such device, a context the model does not have) or `ModelError`
        (damaged or unsupported files). `progress` hears of the stages "load" and "warm-up".
        """
        device = _device(self._config.model.device)
        max_model_len = _context(self._config.model.max_model_len, self._spec)
        threads = self._config.model.threads or usable_cores()
        torch.set_num_threads(threads)
        dtype = settle_dtype(self._config.model.dtype, device, self._spec)
        ops = make_ops(device, dtype, threads=threads)
        try:
            decoder = load_model(
                self._files,
                self._spec,
                device=device,
                dtype=dtype,
                progress=progress,
                ops=ops,
                quantization=self._config.model.quantization,
            )
        except ConfigError as error:
            raise StartupError(str(error)) from error
        if ops.has_own_threads:
            torch.set_num_threads(1)  # torch's threads would only stand in the way of the kernels'
        pool = self._make_pool(decoder, dtype, max_model_len)
        formats = f"{_name(dtype)} {self._config.model.quantization} {pool.layout.format}"
        operations = f"{type(ops).__name__} {getattr(ops, 'instruction_set', torch.__version__)}"
        try:
            self.tiers = make_tiers(self._config.cache, self._files, pool, formats=formats, operations=operations)
        except TierError as error:
            raise StartupError(str(error)) from error
        self.pool = pool
        self._runner = ModelRunner(decoder, pool, self._spec.vocab_size)
        self._runner.tiers = self.tiers
        self._warm_up(self._runner, pool, max_model_len, progress)
        return ExecutorInfo(
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            max_model_len=max_model_len,
            vocab_size=self._spec.vocab_size,
            summary=_summary(decoder, pool, dtype, threads),
            num_weight_bytes=decoder.num_weight_bytes,
            kv_bytes_per_token=pool.data.nbytes / (pool.num_blocks * pool.block_size),
            formats=formats,
            threads=threads,
        )

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Compute one step; steps must come in order."""
        assert self._runner is not None, "execute before start"
        return self._runner.execute(step)

    def use_tiers(self, tiers: TierConnector | None) -> None:
        """Steps move blocks from and to these from now on."""
        assert self._runner is not None, "use_tiers before start"
        self.tiers = self._runner.tiers = tiers

    def reset(self) -> None:
        """Forget all requests, as after `start`."""
        assert self._runner is not None, "reset before start"
        self._runner.reset()

    def _make_pool(self, decoder: Decoder, dtype: torch.dtype, max_model_len: int) -> KVPool:
        cache = self._config.cache
        layout = decoder.kv_layout(cache.block_size, settle_kv_format(cache.kv_cache_dtype, dtype, decoder.quantized))
        request = PoolRequest(
            bytes_per_block=KVPool.bytes_per_block(layout, self._spec.num_layers),
            block_size=cache.block_size,
            max_model_len=max_model_len,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            wanted_bytes=cache.kv_cache_memory,
            # A context that the caller chose must fit; one that the model happens to have is lowered to the pool.
            min_tokens=self._config.model.max_model_len or _MIN_TOKENS,
        )
        count = num_blocks(request, free_memory(decoder.device))
        return KVPool(layout, self._spec.num_layers, count, decoder.device)

    def _warm_up(self, runner: ModelRunner, pool: KVPool, max_model_len: int, progress: Progress | None) -> None:
        scheduler = self._config.scheduler
        steps = list(
            warmup_steps(
                num_blocks=pool.num_blocks,
                block_size=pool.block_size,
                max_model_len=max_model_len,
                max_chunk=min(scheduler.max_num_batched_tokens, _WARM_CHUNK),
                mixed_chunk=min(scheduler.max_num_batched_tokens, _WARM_MIXED_CHUNK),
                max_num_seqs=scheduler.max_num_seqs,
            )
        )
        for done, step in enumerate(steps):
            if progress is not None:
                progress("warm-up", done, len(steps))
            runner.execute(step)
        if progress is not None:
            progress("warm-up", len(steps), len(steps))
        assert runner.num_requests == 0


def settle_dtype(choice: str, device: torch.device, spec: ModelSpec) -> torch.dtype:
    """The weights' and activations' dtype. `auto`: float32 on a CPU, the checkpoint's own on CUDA."""
    if choice != "auto":
        return _dtype(choice)
    return torch.float32 if device.type == "cpu" else _dtype(spec.torch_dtype)


def settle_kv_format(choice: str, dtype: torch.dtype, quantized: bool) -> KVFormat:
    """How keys and values are held. `auto`: as activations are; but in half of a float's bytes beside quantized
    weights, whose rounding moves an answer thousands of times further (docs/reference/quantization.md).
    """
    if choice != "auto":
        return KVFormat(choice)
    return KVFormat.FLOAT16 if quantized and dtype is torch.float32 else KVFormat(_name(dtype))


def _dtype(name: str) -> torch.dtype:
    """A dtype that the model can be held in; checkpoints in any other (float64, 8-bit) are held in bfloat16."""
    return {"float32": torch.float32, "float16": torch.float16}.get(name, torch.bfloat16)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError(
            "device is cuda, but this torch finds no CUDA device: use --device cpu, or install a CUDA build"
        )
    return torch.device(name)


def _context(wanted: int | None, spec: ModelSpec) -> int:
    if wanted is not None and wanted > spec.max_position_embeddings:
        raise StartupError(
            f"max_model_len is {wanted}, but the model's context is {spec.max_position_embeddings} tokens: lower it"
        )
    return wanted or spec.max_position_embeddings


def _summary(decoder: Decoder, pool: KVPool, dtype: torch.dtype, threads: int) -> str:
    spec, kv_format = decoder.spec, pool.layout.format
    kv_dtype = "" if kv_format == _name(dtype) else f" {kv_format}"
    return (
        f"{spec.architecture}, {spec.num_parameters / 1e6:.4g}M parameters on {pool.device}, {_name(dtype)}, "
        f"{threads} threads, weights {decoder.num_weight_bytes / 1e6:,.0f} MB, "
        f"KV pool {pool.num_blocks * pool.block_size:,} tokens ({pool.data.nbytes / 1e6:,.0f} MB{kv_dtype})"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
