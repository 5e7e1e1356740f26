"""Configuration: frozen sections, the lowest layer. Owns defaults and limits; knows nothing of what is configured.

Every number from outside is checked here, once, by `validate`; nothing is written to a section after construction.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, get_args

Device = Literal["cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"]
Quantization = Literal["auto", "none", "int8", "int4", "fp8"]
PolicyName = Literal["fcfs", "srpf", "edf"]
OnSloMiss = Literal["queue", "reject"]
GenerationConfig = Literal["model", "none"]

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_KV_DISK_SIZE = 16 << 30


class ConfigError(ValueError):
    """A configuration that cannot work. The message names the field and says what to do."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how its weights are held."""

    model: str = DEFAULT_MODEL  # folder, .gguf file, hub id or built-in alias
    served_model_name: str | None = None  # the name clients use; default: `model`
    device: Device = "cpu"
    dtype: DType = "auto"  # auto: float32 on cpu, the checkpoint's own on cuda
    # auto: the checkpoint's own where it is quantized, else int8 on a CPU with native kernels, else none
    quantization: Quantization = "auto"
    max_model_len: int | None = None  # tokens; default: the model's context, lowered to what the KV pool holds
    threads: int | None = None  # compute threads; default: the cores this process may use
    generation_config: GenerationConfig = "model"  # model: its generation_config.json fills in what requests leave out


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool and the prefix cache."""

    block_size: int = 16  # tokens a block
    kv_cache_dtype: KVCacheDType = "auto"  # auto: the model's dtype; float16 for float32 beside quantized weights
    kv_cache_memory: int | None = None  # bytes; default: half of what is free after the weights are loaded
    prefix_cache: bool = True
    kv_ram: int | None = None  # bytes of host memory for blocks that leave an accelerator's pool
    kv_disk: str | None = None  # a folder for blocks that leave memory, and those of the last run
    kv_disk_size: int | None = None  # bytes of its files; None: DEFAULT_KV_DISK_SIZE where there is a folder


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What a step may take, who goes first, and what is promised.

    Chunks of prefill are sized by the predicted time of the step that they are in.
    """

    policy: PolicyName = "srpf"
    slo_tpot_ms: float = 100.0  # what a step that also decodes may take: the gap that running streams see
    max_chunk_ms: float = 200.0  # what a step without decodes may take: the most that a newcomer waits for it
    max_num_batched_tokens: int = 2048  # in any step, however fast it is
    # Tokens of context whose attention costs as much as one token's other work; None is settled at start: the model's.
    attention_horizon: float | None = None
    max_num_seqs: int = 64  # requests that hold blocks at once
    max_num_waiting: int = 4096  # queued requests; more are refused with 429
    srpf_weight: float = 10.0  # srpf: seconds that each second of predicted prefill puts a request back
    # srpf: at most by aging_ms or, if that is more, aging_factor times its own predicted prefill past its turn.
    aging_ms: float = 40_000.0
    aging_factor: float = 4.0
    slo_ttft_ms: float | None = None  # when the first token is due, for requests that do not say
    on_slo_miss: OnSloMiss = "queue"  # reject: 429 at once for a request whose SLO is predicted to be missed
    priority_step_ms: float = 60_000.0  # waiting time that one level of priority is worth
    # Steps in flight: 2 overlaps scheduling with compute. None is settled at start: 1 on cpu, 2 on cuda.
    pipeline_depth: int | None = None
    step_timeout_s: float = 300.0  # seconds after which a step counts as stuck, and the engine as lost


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP side."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int | None = None  # None: what the context's text needs (see `server.http.default_body_limit`)
    max_n: int = 16
    max_logprobs: int = 20
    max_priority: int = 10  # requests may ask for -max_priority (first) to max_priority
    default_max_tokens: int | None = None  # None: up to the context
    token_memory: int = 64 << 20  # bytes of token ids of recent texts; 0: every prompt is tokenized in full
    explain: bool = False  # every answer says why its prompt missed the prefix cache, not only where a header asks
    explain_memory: int = 32 << 20  # bytes of recent prompts that new ones are compared with for that; 0: none
    step_log: str | None = None  # a file that each step is appended to: work, predicted and real time
    log_level: Literal["debug", "info", "warning", "error"] = "info"


@dataclass(frozen=True, slots=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


_RANGES: dict[str, tuple[float, float]] = {
    "max_model_len": (2, 10_000_000),
    "threads": (1, 1024),
    "block_size": (1, 1024),
    "kv_cache_memory": (1 << 16, 1 << 50),
    "kv_ram": (1 << 16, 1 << 50),
    "kv_disk_size": (1 << 16, 1 << 60),
    "max_num_batched_tokens": (1, 1_000_000),
    "slo_tpot_ms": (1, 3_600_000),
    "max_chunk_ms": (1, 3_600_000),
    "attention_horizon": (1, float("inf")),
    "max_num_seqs": (1, 65_536),
    "max_num_waiting": (1, 10_000_000),
    "aging_ms": (0, 86_400_000),
    "srpf_weight": (0, 1_000_000),
    "aging_factor": (0, 1_000_000),
    "slo_ttft_ms": (1, 86_400_000),
    "priority_step_ms": (0, 86_400_000),
    "pipeline_depth": (1, 8),
    "step_timeout_s": (1, 86_400),
    "port": (0, 65_535),
    "max_body_bytes": (1024, 1 << 32),
    "max_n": (1, 1024),
    "max_logprobs": (0, 1000),
    "max_priority": (0, 1_000_000),
    "default_max_tokens": (1, 10_000_000),
    "token_memory": (0, 1 << 40),
    "explain_memory": (0, 1 << 40),
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "device": get_args(Device),
    "dtype": get_args(DType),
    "quantization": get_args(Quantization),
    "kv_cache_dtype": get_args(KVCacheDType),
    "policy": get_args(PolicyName),
    "on_slo_miss": get_args(OnSloMiss),
    "generation_config": get_args(GenerationConfig),
    "log_level": ("debug", "info", "warning", "error"),
}


def validate(config: Config) -> Config:
    """Check every field's range and choice. Raises `ConfigError` that names the field; returns `config` unchanged."""
    for section in (config.model, config.cache, config.scheduler, config.server):
        for item in fields(section):
            value = getattr(section, item.name)
            if item.name in _RANGES and value is not None:
                low, high = _RANGES[item.name]
                if not low <= value <= high:  # also refuses NaN
                    raise ConfigError(f"{item.name} is {value}; it must be from {low:g} to {high:g}")
            if item.name in _CHOICES and value not in _CHOICES[item.name]:
                raise ConfigError(f"{item.name} is {value!r}; it must be one of {', '.join(_CHOICES[item.name])}")
    _check_tiers(config)
    if config.server.explain and not (config.cache.prefix_cache and config.server.explain_memory):
        lacking = "explain_memory" if config.cache.prefix_cache else "prefix_cache"
        raise ConfigError(f"explain says why the prefix cache missed, which needs {lacking}: turn it on")
    if config.scheduler.policy == "edf" and config.scheduler.slo_ttft_ms is None:
        raise ConfigError("policy edf needs slo_ttft_ms: the deadline of requests that name none")
    if config.scheduler.max_num_seqs >= config.scheduler.max_num_batched_tokens:
        raise ConfigError(
            f"max_num_batched_tokens is {config.scheduler.max_num_batched_tokens}; it must exceed max_num_seqs "
            f"({config.scheduler.max_num_seqs}), or decodes would leave no room for prefills"
        )
    return config


def _check_tiers(config: Config) -> None:
    """What a tier needs; an option without effect is an error."""
    cache = config.cache
    if cache.kv_disk_size is not None and cache.kv_disk is None:
        raise ConfigError("kv_disk_size does nothing without kv_disk: name the folder, or leave the size out")
    if cache.kv_disk == "":
        raise ConfigError("kv_disk is empty; it must be a folder")
    if cache.kv_ram is not None and config.model.device == "cpu":
        raise ConfigError("kv_ram is for accelerators; on a CPU the pool is in RAM already: raise kv_cache_memory")
    if not cache.prefix_cache and (cache.kv_disk is not None or cache.kv_ram is not None):
        raise ConfigError("kv_disk and kv_ram keep what leaves the prefix cache, which is off: turn prefix_cache on")
