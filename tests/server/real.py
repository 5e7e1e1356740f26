"""A real server in this process: HTTP, a real engine process, stories260K."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headstart.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from headstart.core.stats import CoreStats
from headstart.engine import AsyncEngine
from headstart.hub import files_of_folder
from headstart.launch import launch_engine
from headstart.perf.model_spec import read_model_spec
from headstart.server import create_app
from headstart.server.app import Observed
from headstart.text import ChatTemplate, Tokenizer
from tests.fixtures.stories import make_stories_folder
from tests.server.harness import Running, serving


@dataclass(frozen=True)
class Served:
    running: Running
    engine: AsyncEngine

    def stats(self) -> CoreStats:
        """As they are after everything that was sent before."""
        return asyncio.run_coroutine_threadsafe(self.engine.ping(), self.running.loop).result(20)


@contextlib.contextmanager
def serving_stories(
    folder: Path, scheduler: SchedulerConfig, *, kv_cache_memory: int = 8 << 20, kv_disk: Path | None = None
) -> Iterator[Served]:
    """Serve the model as `stories`, made in `folder`; the block begins when the engine is ready."""
    config = Config(
        model=ModelConfig(
            model=str(make_stories_folder(folder)), served_model_name="stories", threads=1, quantization="none"
        ),
        cache=CacheConfig(kv_cache_memory=kv_cache_memory, kv_disk=None if kv_disk is None else str(kv_disk)),
        scheduler=scheduler,
    )
    files = files_of_folder(folder)
    tokenizer = Tokenizer.load(files)
    engines: list[AsyncEngine] = []

    def make_app() -> Observed:
        engines.append(launch_engine(config, files, read_model_spec(files)))
        return create_app(engines[0], tokenizer, ChatTemplate.load(files, tokenizer), config)

    async def end() -> None:
        await engines[0].shutdown()

    with serving(make_app, end=end) as running:
        asyncio.run_coroutine_threadsafe(engines[0].wait_ready(), running.loop).result(60)
        yield Served(running, engines[0])
