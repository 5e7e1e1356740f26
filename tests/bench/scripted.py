"""A scripted OpenAI-like server on loopback: each test says what is sent and when; nothing here sleeps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Script = Callable[["Call"], Awaitable[None]]


@dataclass
class Call:
    """One request that the server received, and the means to answer it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    writer: asyncio.StreamWriter
    streamed: bool = False

    @property
    def stream(self) -> bool:
        return isinstance(self.body, dict) and bool(self.body.get("stream"))

    @property
    def num_words(self) -> int:
        """Every word is a token to this server, and so is every message."""
        if "messages" in self.body:
            return sum(1 + len(message["content"].split()) for message in self.body["messages"])
        return len(self.body["prompt"].split())

    async def json(self, value: Any, status: int = 200) -> None:
        payload = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        self.writer.write(head.encode() + payload)
        await self.writer.drain()

    async def text(self, value: str) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(value)}\r\n\r\n"
        self.writer.write((head + value).encode())
        await self.writer.drain()

    async def begin(self, **headers: str) -> None:
        """The head of a stream."""
        self.streamed = True
        fields = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.writer.write(f"HTTP/1.1 200 OK\r\n{lines}\r\n".encode())
        await self.writer.drain()

    async def raw(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self.writer.drain()

    async def event(self, value: Any) -> None:
        await self.raw(b"data: " + (value.encode() if isinstance(value, str) else json.dumps(value).encode()) + b"\n\n")

    async def delta(self, finish_reason: str | None = None, **fields: Any) -> None:
        choice = {"index": 0, "finish_reason": finish_reason}
        if self.path.endswith("/chat/completions"):
            choice["delta"] = fields  # type: ignore[assignment]
        else:
            choice["text"] = fields.get("content", "")
        await self.event({"choices": [choice]})

    async def end(self, **usage: Any) -> None:
        """The usage chunk, [DONE] and the end of the stream."""
        await self.event({"choices": [], "usage": {"prompt_tokens": self.num_words} | usage})
        await self.event("[DONE]")
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()


async def answer(call: Call) -> None:
    """What a well-behaved server would send: `max_tokens` deltas, at once."""
    num_tokens = call.body["max_tokens"]
    if not call.stream:
        usage = {"prompt_tokens": call.num_words, "completion_tokens": num_tokens}
        await call.json({"choices": [{"text": "x", "message": {"content": "x"}}], "usage": usage})
        return
    await call.begin()
    for index in range(num_tokens):
        await call.delta(content="x ", finish_reason="length" if index == num_tokens - 1 else None)
    await call.end(completion_tokens=num_tokens)


@dataclass
class ScriptedServer:
    """`script` answers POSTs to the completion endpoints, and questions for metrics if there are any.

    Probes (not streamed) are answered by `answer`.
    """

    script: Script = answer
    has_tokenize: bool = True
    has_metrics: bool = False
    calls: list[Call] = field(default_factory=list)
    url: str = ""
    num_open: int = 0
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def streams(self) -> list[Call]:
        return [call for call in self.calls if call.stream]

    async def wait_for_streams(self, count: int) -> None:
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.streams) >= count)

    async def wait_for_open(self, count: int) -> None:
        async with self.arrived:
            await self.arrived.wait_for(lambda: self.num_open == count)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._count(1)
        try:
            while True:
                call = await _read(reader, writer)
                self.calls.append(call)
                async with self.arrived:
                    self.arrived.notify_all()
                await self._dispatch(call)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            await self._count(-1)

    async def _count(self, change: int) -> None:
        async with self.arrived:
            self.num_open += change
            self.arrived.notify_all()

    async def _dispatch(self, call: Call) -> None:
        if call.path.endswith("/v1/models"):
            await call.json({"data": [{"id": "scripted"}]})
        elif call.path.endswith("/tokenize") and self.has_tokenize:
            await call.json({"count": len(call.body["prompt"].split())})
        elif call.path.endswith("completions"):
            await (self.script if call.stream else answer)(call)
        elif call.path == "/metrics" and self.has_metrics:
            await self.script(call)
        else:
            await call.json({"error": {"message": "not here"}}, status=404)


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Call:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Call(method, path, headers, json.loads(body) if body else None, writer)


@asynccontextmanager
async def scripted_server(
    script: Script = answer, *, has_tokenize: bool = True, has_metrics: bool = False
) -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer(script, has_tokenize, has_metrics)
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(scripted.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield scripted
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
