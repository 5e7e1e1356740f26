"""A real uvicorn on a free port, and an engine that follows a script, for what a real one cannot be made to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import uvloop

from headstart.config import Config, ModelConfig, SchedulerConfig, ServerConfig
from headstart.core.request import EngineRequest, FinishReason
from headstart.core.stats import PREFILL_STEP_TOKENS, CoreStats
from headstart.core.step import RequestOutput, TokenLogprob
from headstart.engine import EngineInfo, EngineState, RequestTooLong, Reservation
from headstart.server import create_app, listen, make_server, url_of
from headstart.server.app import Observed
from headstart.server.connection import ConnectionLimits
from headstart.text import ChatTemplate, Tokenizer

T = TypeVar("T")
MODEL = "stories"
STATS = CoreStats(1, 2, 30, 10, 64, 13, 5, 600, 70, 80, 9, 11, 12, prefill_steps=(0,) * (len(PREFILL_STEP_TOKENS) + 1))
ENGINE_LEDGER = (("admit", 0.0), ("queue", 0.0), ("prefill", 0.0), ("interference", 0.0), ("sample", 0.0))


@dataclass
class ScriptedEngine:
    """Offers what the server uses of `AsyncEngine`. Every request gets `answer(request)`, a token an output.

    `gate` is awaited before the first output. `refuse` is raised instead of an answer, `break_after` after so many
    tokens; `end` replaces the last output. `batch` tokens come in one output.
    """

    answer: Callable[[EngineRequest], Sequence[int]]
    state: EngineState = EngineState.READY
    info: EngineInfo = field(
        default_factory=lambda: EngineInfo(
            max_model_len=512, num_blocks=64, block_size=16, vocab_size=512, prefix_cache=True, summary="scripted"
        )
    )
    batch: int = 1
    refuse: Exception | None = None
    break_after: tuple[int, Exception] | None = None
    end: RequestOutput | None = None
    gate: asyncio.Event | None = None
    requests: list[EngineRequest] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def stats(self) -> CoreStats | None:
        return STATS

    def _note(self, change: Callable[[], None]) -> None:
        with self.changed:
            change()
            self.changed.notify_all()

    def reserve(self, count: int) -> Reservation:
        if self.refuse is not None:
            raise self.refuse
        return Reservation(count)

    async def generate(
        self, request: EngineRequest, reservation: Reservation | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        if self.refuse is not None:
            raise self.refuse
        if len(request.prompt_token_ids) + min(request.params.max_tokens, 1) > self.info.max_model_len:
            raise RequestTooLong(len(request.prompt_token_ids), self.info.max_model_len, self.info.num_kv_tokens)
        self._note(lambda: (self.requests.append(request), self.running.add(request.request_id)))  # type: ignore[func-returns-value]
        finished = False
        try:
            if self.gate is not None:
                await self.gate.wait()
            async for output in self._outputs(request):
                finished = output.finish_reason is not None
                yield output
        finally:
            if not finished:
                self.aborted.append(request.request_id)
            self._note(lambda: self.running.discard(request.request_id))

    async def _outputs(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        params = request.params
        tokens = list(self.answer(request))[: params.max_tokens]
        stop_at = next((at for at, token in enumerate(tokens) if token in params.stop_token_ids), None)
        shown = tokens if stop_at is None else tokens[:stop_at]
        prompt_logprobs = ()
        if params.prompt_logprobs is not None:
            prompt_logprobs = tuple(logprob_of(token) for token in request.prompt_token_ids[1:])
        count = 0
        ledger = ENGINE_LEDGER
        for start in range(0, len(shown), self.batch):
            if self.break_after is not None and count >= self.break_after[0]:
                raise self.break_after[1]
            await asyncio.sleep(0)
            ids = tuple(shown[start : start + self.batch])
            count += len(ids)
            output = RequestOutput(
                request.request_id,
                token_ids=ids,
                logprobs=() if params.logprobs is None else tuple(map(logprob_of, ids)),
                prompt_logprobs=prompt_logprobs,
                num_output_tokens=count,
                num_cached_tokens=3,
                time=time.monotonic(),
                ledger=ledger,
            )
            ledger, prompt_logprobs = (), ()
            if stop_at is None and start + self.batch >= len(shown) and self.end is None:
                output = output._replace(finish_reason=FinishReason.LENGTH)
            yield output
        if self.end is not None:
            yield self.end._replace(request_id=request.request_id, time=time.monotonic())
        elif stop_at is not None or not shown:
            yield RequestOutput(
                request.request_id,
                prompt_logprobs=prompt_logprobs,
                finish_reason=FinishReason.STOP if stop_at is not None else FinishReason.LENGTH,
                stop_token_id=None if stop_at is None else tokens[stop_at],
                num_output_tokens=count + (stop_at is not None),
                num_cached_tokens=3,
                time=time.monotonic(),
                ledger=ledger if tokens else (),
            )

    def wait_until(self, condition: Callable[[], bool], timeout: float = 10.0) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout), "the engine never came to that"


def logprob_of(token: int) -> TokenLogprob:
    return TokenLogprob(token, -token / 100, 1, ((token, -token / 100), ((token + 1) % 512, -9.0)))


@dataclass
class Running:
    """A server that runs in a thread of its own."""

    url: str
    loop: asyncio.AbstractEventLoop
    client: httpx.Client
    stop: Callable[[], None]
    sockets: contextlib.ExitStack

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the server's event loop."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def connect(self) -> socket.socket:
        """A raw connection, closed with the server at the latest."""
        host, port = self.url.removeprefix("http://").split(":")
        return self.sockets.enter_context(socket.create_connection((host, int(port)), timeout=10))


@contextlib.contextmanager
def serving(
    make_app: Callable[[], Observed],
    *,
    grace_seconds: int = 1,
    end: Callable[[], Awaitable[None]] | None = None,
    limits: ConnectionLimits | None = None,
) -> Iterator[Running]:
    """Serve what `make_app` makes (inside the server's event loop) until the block ends, then await `end()`."""
    listener = listen(ServerConfig(port=0))
    url = url_of(listener)
    started = threading.Event()
    found: dict[str, Any] = {}

    async def main() -> None:
        found["loop"] = asyncio.get_running_loop()
        app = make_app()
        server = found["server"] = make_server(
            app, on_listening=started.set, on_refused=app.refused, grace_seconds=grace_seconds, limits=limits
        )
        await server.serve(sockets=[listener])
        if end is not None:
            await end()

    def run() -> None:
        try:
            uvloop.run(main())
        except BaseException as error:
            found["error"] = error
            raise
        finally:
            started.set()

    thread = threading.Thread(target=run, name="server under test")
    thread.start()
    assert started.wait(20)
    assert "error" not in found, found

    def stop() -> None:
        found["server"].should_exit = True
        thread.join(20)
        assert not thread.is_alive()

    try:
        with httpx.Client(base_url=url, timeout=20, trust_env=False) as client, contextlib.ExitStack() as sockets:
            yield Running(url, found["loop"], client, stop, sockets)
    finally:
        stop()


def scripted_app(
    engine: ScriptedEngine,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    server: ServerConfig | None = None,
    scheduler: SchedulerConfig | None = None,
) -> Observed:
    config = Config(
        model=ModelConfig(model=MODEL), server=server or ServerConfig(), scheduler=scheduler or SchedulerConfig()
    )
    return create_app(engine, tokenizer, template, config)  # type: ignore[arg-type]


def events(text: str) -> list[Any]:
    """The data of a stream's events, decoded; `[DONE]` stays text. Asserts that nothing else is in it."""
    assert text.endswith("\n\n")
    found: list[Any] = []
    for event in text[:-2].split("\n\n"):
        lines = event.split("\n")
        assert len(lines) == 1 or lines[0] == "event: error"
        data = lines[-1].removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, after checking that it has OpenAI's shape and shows no trace."""
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return error
