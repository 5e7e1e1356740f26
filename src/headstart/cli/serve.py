"""`headstart serve`: composes the API process, from a configuration to a server that runs until it is told to stop.

Owns the order of starting (address, model files, listening, engine, ready) and of stopping (requests, engine), and
what is said about it. The engine's composition is `headstart.launch`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import uvloop

from headstart import launch, server
from headstart.cli.errors import CommandError, one_line_errors
from headstart.cli.options import SectionedCommand, given, setting_options
from headstart.cli.progress import TerminalProgress
from headstart.config import Config
from headstart.engine import AsyncEngine
from headstart.hub.generation_config import SamplingDefaults
from headstart.perf.garbage import freeze_garbage_collector
from headstart.settings import settle

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_WIDTH = 79
_NO_BREAK = "\N{NO-BREAK SPACE}"


@click.command(cls=SectionedCommand)
@click.argument("model", required=False)
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="TOML file with [model] [cache] [scheduler] [server] sections.",
)
@setting_options(without=frozenset({"model"}))
def serve(model: str | None, config_file: Path | None, **flags: Any) -> None:
    """Serve MODEL (a folder, a .gguf file, a hub id or a built-in alias; default: smollm2-135m) over HTTP.

    Every setting can also come from the environment (HEADSTART_MAX_NUM_SEQS for --max-num-seqs) or from the TOML file;
    a flag wins over the environment, the environment over the file.
    """
    started = time.perf_counter()
    with one_line_errors():
        config = settle(given({"model": model, **flags}), os.environ, config_file)
        logging.basicConfig(level=config.server.log_level.upper(), format=_LOG_FORMAT)
        with _address_errors():
            listener = server.bind(config.server)
        with listener, TerminalProgress() as progress:
            loaded = launch.load_model(config, progress)
            config = launch.settle_config(config, loaded.spec)
            with _address_errors():
                server.start_listening(listener, config.server)
            uvloop.run(_Serving(config, listener, progress, started).run(loaded))


class _Serving:
    """One run of the server on an event loop."""

    def __init__(self, config: Config, listener: socket.socket, progress: TerminalProgress, started: float) -> None:
        self._config = config
        self._listener = listener
        self._progress = progress
        self._started = started

    async def run(self, model: launch.LoadedModel) -> None:
        """Until SIGINT or SIGTERM. Raises `StartupError` when the engine cannot start; answers 503 while it starts."""
        engine = launch.launch_engine(self._config, model.files, model.spec, progress=self._progress)
        app = server.create_app(engine, model.tokenizer, model.template, self._config, model.defaults)
        freeze_garbage_collector()  # while the engine loads
        with _calm_signals():
            try:
                serving = asyncio.create_task(
                    server.serve(app, self._listener, on_waiting=self._say_what_is_left, on_refused=app.refused)
                )
                starting = asyncio.create_task(engine.wait_ready())
                await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    starting.result()
                    self._announce(engine, model.defaults)
                    freeze_garbage_collector()  # what came since; a small rest
                starting.cancel()
                await serving
            finally:
                await engine.shutdown()

    def _announce(self, engine: AsyncEngine, defaults: SamplingDefaults) -> None:
        self._progress.stop()
        if self._is_talkative():
            for line in settled_lines(self._config, engine, defaults):
                click.echo(line, err=True)
            seconds = time.perf_counter() - self._started
            click.secho(f"ready after {seconds:.1f} s: {server.url_of(self._listener)}", fg="green", err=True)

    def _say_what_is_left(self, num_requests: int, seconds: int) -> None:
        if self._is_talkative():
            requests = "1 request" if num_requests == 1 else f"{num_requests} requests"
            click.echo(f"stopping: {requests} may finish within {seconds} s; Ctrl-C again ends them now", err=True)

    def _is_talkative(self) -> bool:
        return self._config.server.log_level in ("debug", "info")


def settled_lines(config: Config, engine: AsyncEngine, defaults: SamplingDefaults) -> list[str]:
    """The configuration that came out of flags, model and memory, for a terminal of 80 columns. `config` is settled."""
    info, scheduler = engine.info, config.scheduler
    sampling = defaults.describe()
    groups = (
        info.summary,
        f"context {info.max_model_len:,}, blocks of {info.block_size}, prefix cache {_on_off(info.prefix_cache)}",
        f"{scheduler.policy}, up to {scheduler.max_num_seqs} requests, steps of {scheduler.max_chunk_ms:g} ms and "
        f"{scheduler.slo_tpot_ms:g} ms beside decodes",
        f"depth {scheduler.pipeline_depth}, attention horizon {scheduler.attention_horizon:,.0f}",
        *([f"sampling unless asked otherwise: {sampling}"] if sampling else []),
    )
    return [config.model.served_model_name or config.model.model, *(line for text in groups for line in _wrap(text))]


def _wrap(text: str) -> list[str]:
    """Lines that break after commas only."""
    phrases = text.replace(", ", ",\n").replace(" ", _NO_BREAK).replace("\n", " ")
    lines = textwrap.wrap(phrases, _WIDTH, initial_indent="  ", subsequent_indent="    ")
    return [line.replace(_NO_BREAK, " ") for line in lines]


def _on_off(value: bool) -> str:
    return "on" if value else "off"


@contextlib.contextmanager
def _address_errors() -> Iterator[None]:
    try:
        yield
    except server.AddressError as error:
        raise CommandError(str(error)) from error


@contextlib.contextmanager
def _calm_signals() -> Iterator[None]:
    """The HTTP server stops at SIGINT or SIGTERM and then raises it again; by then nothing is left to interrupt."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
