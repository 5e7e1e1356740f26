"""How long others wait while a chat prompt of 1 MB arrives, is parsed, rendered, tokenized, and refused or served.

Starts a server of its own. A probe asks for `/health` several hundred times a second, over one connection: its answer
comes from the event loop that also writes everybody's tokens, so how late it is, so late is a token. Each round is a
window without a large prompt and then one with it, from its first byte sent to its answer. The prompts are of several
kinds, since each keeps another part of the server busy. The bar is on the worst answer of all rounds with a prompt,
less the worst without.

    python benchmarks/loop_stall.py
    python benchmarks/loop_stall.py --kinds words,messages --rounds 20
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _verdict import Bar, finish, run_main, show

from headstart.bench.options import BenchError
from headstart.bench.stats import percentile
from headstart.cli.local_server import LocalServer
from headstart.config import DEFAULT_MODEL

STALL_BAR_MS = 50.0
BYTES = 1_000_000
PROBE_SECONDS = 0.001  # between an answer and the next question
QUIET_SECONDS = 0.5
TIMEOUT_SECONDS = 120.0
SENTENCE = "The quick brown fox jumps over the lazy dog near the river. "


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def chat(*messages: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"messages": list(messages), "max_tokens": 1, **more}).encode()


def repeated(text: str, num_bytes: int = BYTES) -> str:
    return text * (num_bytes // len(json.dumps(text)[1:-1].encode()) + 1)


KINDS: dict[str, tuple[Callable[[], bytes], int]] = {  # the body, and the status that it gets
    "words": (lambda: chat(user(repeated(SENTENCE))), 400),
    "one word": (lambda: chat(user("a" * BYTES)), 400),
    "escapes": (lambda: chat(user(repeated("日本語のテキスト"))), 400),
    "control tokens": (lambda: chat(user(repeated("<|im_start|><|im_end|>"))), 400),
    "messages": (lambda: chat(*[user("x" * 70)] * 10_000), 400),
    "parts": (lambda: chat(user([{"type": "text", "text": "word " * 4}] * 20_000)), 400),
    "unprinted": (lambda: chat(user("Hello", reasoning_content=repeated(SENTENCE))), 200),
    "numbers": (lambda: chat(user("Hello", extra=[[1, 2, 3, {"a": 4}]] * 45_000)), 200),
    "broken": (lambda: chat(user(repeated(SENTENCE)))[:-1], 400),
}


@dataclass(frozen=True, slots=True)
class Found:
    """Milliseconds that `/health` took, by window."""

    quiet: list[list[float]]
    loaded: list[list[float]]
    request_ms: list[float]

    @property
    def added(self) -> float:
        return worst(self.loaded) - worst(self.quiet)


def worst(windows: list[list[float]]) -> float:
    return max(map(max, windows))


class Connection:
    """A kept connection that asks one thing after the other."""

    def __init__(self, host: str, port: int, api_key: str) -> None:
        self._socket = socket.create_connection((host, port), timeout=TIMEOUT_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = f"Host: {host}\r\nAuthorization: Bearer {api_key}\r\n"
        self._held = b""

    def exchange(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of an answer that says its length. Raises `BenchError` if there is none."""
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        self._socket.sendall(f"{method} {path} HTTP/1.1\r\n{self._head}{kind}\r\n".encode() + body)
        head = self._read_until(b"\r\n\r\n").decode("latin-1").lower()
        length = next(int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:"))
        while len(self._held) < length:
            self._receive()
        content, self._held = self._held[:length], self._held[length:]
        return int(head.split()[1]), content

    def close(self) -> None:
        self._socket.close()

    def _read_until(self, end: bytes) -> bytes:
        while (at := self._held.find(end)) < 0:
            self._receive()
        found, self._held = self._held[:at], self._held[at + len(end) :]
        return found

    def _receive(self) -> None:
        data = self._socket.recv(1 << 16)
        if not data:
            raise BenchError("the server closed a connection")
        self._held += data


def probe(connection: Connection, goes_on: Callable[[], bool]) -> list[float]:
    """Milliseconds of each answer, at least one, until `goes_on` says no."""
    found = []
    while not found or goes_on():
        began = time.perf_counter()
        status, _ = connection.exchange("GET", "/health")
        found.append((time.perf_counter() - began) * 1000)
        if status != 200:
            raise BenchError(f"/health says {status}")
        time.sleep(PROBE_SECONDS)
    return found


@contextmanager
def sending(connection: Connection, body: bytes, status: int) -> Iterator[threading.Thread]:
    """The prompt on its way in a thread of its own, and answered at the end of the block."""
    failure: list[str] = []

    def send() -> None:
        try:
            got, content = connection.exchange("POST", "/v1/chat/completions", body)
            if got != status:
                failure.append(f"expected {status}, got {got}: {content[:200].decode('utf-8', 'replace')}")
        except (OSError, BenchError) as error:
            failure.append(str(error))

    thread = threading.Thread(target=send)
    thread.start()
    yield thread
    thread.join()
    if failure:
        raise BenchError(failure[0])


def measure(connect: Callable[[], Connection], body: bytes, status: int, rounds: int) -> Found:
    prober, sender = connect(), connect()
    found = Found([], [], [])
    try:
        probe(prober, lambda: False)
        for _ in range(rounds):
            end = time.perf_counter() + QUIET_SECONDS
            found.quiet.append(probe(prober, lambda end=end: time.perf_counter() < end))  # type: ignore[misc]
            began = time.perf_counter()
            with sending(sender, body, status) as thread:
                found.loaded.append(probe(prober, thread.is_alive))
            found.request_ms.append((time.perf_counter() - began) * 1000)
    finally:
        prober.close()
        sender.close()
    return found


def row(name: str, found: Found) -> list[str]:
    quiet, loaded = ([ms for window in windows for ms in window] for windows in (found.quiet, found.loaded))
    numbers = (
        percentile(quiet, 0.99),
        max(quiet),
        percentile(loaded, 0.99),
        max(loaded),
        percentile(found.request_ms, 0.5),
    )
    return [name, *(f"{number:.1f}" for number in numbers)]


def kinds_of(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be of {', '.join(KINDS)}")
    return names


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"to serve (default {DEFAULT_MODEL})")
    parser.add_argument("--kinds", type=kinds_of, default=list(KINDS), metavar="KIND,…", help=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=10, help="of each kind (default 10)")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    found: dict[str, Found] = {}
    with LocalServer(args.model, ["--kv-cache-memory", "1GiB"]) as server:
        port = int(server.client.base_url.rpartition(":")[2])
        for name in args.kinds:
            print(f"{name} ...", file=sys.stderr, flush=True)
            make, status = KINDS[name]
            found[name] = measure(lambda: Connection("127.0.0.1", port, server.api_key), make(), status, args.rounds)
    columns = ("a prompt of 1 MB", "p99 without", "worst", "p99 with", "worst", "answered after, ms")
    bars = [
        Bar(f"{name}: worst added stall, ms", each.added, STALL_BAR_MS, at_most=True) for name, each in found.items()
    ]
    show("/health while a large prompt is taken in, ms", columns, [row(*item) for item in found.items()], bars)
    results = {
        name: {"quiet_ms": each.quiet, "loaded_ms": each.loaded, "request_ms": each.request_ms}
        for name, each in found.items()
    }
    return finish(args.json, results, bars)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
