"""The composition root of the API process: from a configuration to a running engine. Never imports torch.

Its other half, which makes the worker inside the engine process, is `headstart.replica`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec

from headstart.config import Config, ConfigError, ServerConfig
from headstart.engine.async_engine import AsyncEngine, EngineLimits
from headstart.engine.process import EngineProcess, python_command
from headstart.hub import ModelFiles, Progress, resolve
from headstart.hub.generation_config import SamplingDefaults, read_sampling_defaults
from headstart.perf.checkpoint import check_vocabulary, read_checked_spec
from headstart.perf.model_spec import ModelSpec
from headstart.text import ChatTemplate, Tokenizer


class EngineSetup(msgspec.Struct, frozen=True):
    """What an engine process is told to be."""

    config: Config
    files: ModelFiles
    spec: ModelSpec


def encode_setup(setup: EngineSetup) -> bytes:
    return msgspec.msgpack.encode(setup, enc_hook=_path_to_text)


def decode_setup(data: bytes) -> EngineSetup:
    return msgspec.msgpack.decode(data, type=EngineSetup, dec_hook=_text_to_path)


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the API process knows of a model, and that its files fit together."""

    files: ModelFiles
    spec: ModelSpec
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: SamplingDefaults


def load_model(config: Config, progress: Progress | None = None) -> LoadedModel:
    """Fetch a model and check all that headers tell: configuration, tokenizer, the tensors' names, shapes and types.

    Raises `ModelError`. What only the weights' values can tell is left to the engine.
    """
    files = resolve(config.model.model, progress=progress)
    spec = read_checked_spec(files)
    tokenizer = Tokenizer.load(files)
    check_vocabulary(tokenizer.vocab_size, spec, files.name)
    template = ChatTemplate.load(files, tokenizer)
    defaults = read_sampling_defaults(files) if config.model.generation_config == "model" else SamplingDefaults()
    return LoadedModel(files, spec, tokenizer, template, defaults)


def settle_config(config: Config, spec: ModelSpec) -> Config:
    """Fill in what device and model decide: steps in flight and attention horizon. Settling twice changes nothing.

    Raises `ConfigError` for a context that the model does not have.
    """
    wanted = config.model.max_model_len
    if wanted is not None and wanted > spec.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {wanted}, but the model's context is {spec.max_position_embeddings} tokens: lower it"
        )
    scheduler = config.scheduler
    depth, horizon = scheduler.pipeline_depth, scheduler.attention_horizon
    settled = dataclasses.replace(
        scheduler,
        pipeline_depth=depth if depth is not None else 1 if config.model.device == "cpu" else 2,
        attention_horizon=horizon if horizon is not None else max(1.0, spec.attention_horizon),
    )
    return dataclasses.replace(config, scheduler=settled)


def launch_engine(
    config: Config, files: ModelFiles, spec: ModelSpec, *, progress: Progress | None = None
) -> AsyncEngine:
    """Start an engine process for a resolved model; call it inside a running event loop and await `wait_ready`.

    `progress` is called in the event loop's thread while the engine loads.
    """
    # Of the server's section the engine has no use but for its logs; least of all for API keys.
    logs = ServerConfig(log_level=config.server.log_level, step_log=config.server.step_log)
    without_secrets = dataclasses.replace(config, server=logs)
    setup = EngineSetup(without_secrets, files, spec)
    process = EngineProcess(python_command("headstart.replica"), encode_setup(setup))
    limits = EngineLimits(
        max_num_requests=config.scheduler.max_num_seqs + config.scheduler.max_num_waiting,
        max_num_waiting=config.scheduler.max_num_waiting,
    )
    return AsyncEngine(process, limits, progress)


def _path_to_text(value: Any) -> str:
    assert isinstance(value, Path)
    return str(value)


def _text_to_path(kind: type, value: Any) -> Path:
    assert kind is Path
    return Path(value)
