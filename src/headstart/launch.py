"""The composition root of the API process: from a configuration to a running engine. Never imports torch.

Its other half, which makes the worker inside the engine process, is `headstart.replica`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec

from headstart.config import Config, ServerConfig
from headstart.engine.async_engine import AsyncEngine, EngineLimits
from headstart.engine.process import EngineProcess, python_command
from headstart.hub import ModelFiles, Progress
from headstart.perf.model_spec import ModelSpec


class EngineSetup(msgspec.Struct, frozen=True):
    """What an engine process is told to be."""

    config: Config
    files: ModelFiles
    spec: ModelSpec


def encode_setup(setup: EngineSetup) -> bytes:
    return msgspec.msgpack.encode(setup, enc_hook=_path_to_text)


def decode_setup(data: bytes) -> EngineSetup:
    return msgspec.msgpack.decode(data, type=EngineSetup, dec_hook=_text_to_path)


def launch_engine(
    config: Config, files: ModelFiles, spec: ModelSpec, *, progress: Progress | None = None
) -> AsyncEngine:
    """Start an engine process for a resolved model; call it inside a running event loop and await `wait_ready`.

    `progress` is called in the event loop's thread while the engine loads.
    """
    without_secrets = dataclasses.replace(config, server=ServerConfig())  # the engine has no use for API keys
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
