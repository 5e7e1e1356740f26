"""A small client of the chat API for the terminal: one streamed answer, timed as its user sees it.

Owns reading server-sent events and the `Server-Timing` header. Standard library only; works with any OpenAI-compatible
server, and shows more where the server is Headstart.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

Message = Mapping[str, str]


class ServerError(RuntimeError):
    """The server could not be reached or refused; the message says which, in one line."""


class AddressError(ServerError):
    """No server can be meant: the URL or the key is malformed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer. Times are in seconds."""

    text: str
    ttft: float  # request sent -> first non-empty content
    total: float  # request sent -> end of the stream
    timing: tuple[tuple[str, float], ...]  # the server's ledger, from `Server-Timing`; empty where it sends none
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: str | None

    @property
    def tpot(self) -> float | None:
        """Mean gap between tokens after the first; None for an answer of one token."""
        return (self.total - self.ttft) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None


def parse_server_timing(header: str) -> tuple[tuple[str, float], ...]:
    """`"queue;dur=1.5, prefill;dur=20"` -> (("queue", 0.0015), ("prefill", 0.02)); entries without a "dur" go."""
    parts = []
    for entry in header.split(","):
        name, *parameters = (piece.strip() for piece in entry.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip().lower() == "dur":
                parts.append((name, float(value.strip().strip('"')) / 1000))
    return tuple(parts)


def read_events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON events of an SSE stream up to `[DONE]`. Raises `ServerError` for an error event."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ServerError(_message_of(event))
        yield event


class Client:
    """Talks to one server. `base_url` without `/v1`."""

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        port = _port(parts)
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise AddressError(f"{base_url!r} is not the URL of a server; write it like http://127.0.0.1:8000")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise AddressError("the API key has characters that no HTTP header can carry")
        self.base_url = f"{parts.scheme}://{parts.netloc}"
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._connect: Callable[[], http.client.HTTPConnection] = lambda: (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )(parts.hostname or "", port, timeout=timeout)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def models(self) -> list[str]:
        """Names of the models that the server offers."""
        connection, response = self._request("GET", "/v1/models", None)
        try:
            return [model["id"] for model in json.loads(response.read())["data"]]
        finally:
            connection.close()

    def is_ready(self) -> bool:
        """Whether the server answers and has warmed up."""
        connection = self._connect()
        try:
            connection.request("GET", f"{self._prefix}/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def chat(
        self,
        model: str,
        messages: Sequence[Message],
        *,
        on_text: Callable[[str], None] = lambda _: None,
        **options: Any,
    ) -> Answer:
        """Stream one answer. `on_text` gets each piece as it arrives; `options` go into the request as they are."""
        body = {"model": model, "messages": list(messages), "stream": True, "stream_options": {"include_usage": True}}
        sent = time.perf_counter()
        connection, response = self._request("POST", "/v1/chat/completions", json.dumps(body | options).encode())
        try:
            return _read_answer(response, sent, on_text)
        finally:
            connection.close()

    def _request(
        self, method: str, path: str, body: bytes | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._connect()
        try:
            connection.request(method, self._prefix + path, body, self._headers)
            response = connection.getresponse()
        except OSError as error:
            connection.close()
            raise ServerError(f"cannot reach {self.base_url}: {error.strerror or error}") from error
        if response.status != 200:
            text = response.read().decode("utf-8", "replace")
            connection.close()
            raise ServerError(f"{self.base_url} answered {response.status}: {_reason(text)}")
        return connection, response


def _port(parts: SplitResult) -> int | None:
    """None: the scheme's own; 0: it is none."""
    try:
        return parts.port
    except ValueError:
        return 0


def _read_answer(response: http.client.HTTPResponse, sent: float, on_text: Callable[[str], None]) -> Answer:
    pieces: list[str] = []
    first: float | None = None
    usage: Mapping[str, Any] = {}
    finish_reason = None
    for event in read_events(iter(response.readline, b"")):
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            text = choice.get("delta", {}).get("content") or ""
            finish_reason = choice.get("finish_reason") or finish_reason
            if text:
                first = time.perf_counter() if first is None else first
                pieces.append(text)
                on_text(text)
    end = time.perf_counter()
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        text="".join(pieces),
        ttft=(end if first is None else first) - sent,
        total=end - sent,
        timing=parse_server_timing(response.headers.get("Server-Timing", "")),
        num_prompt_tokens=usage.get("prompt_tokens", 0),
        num_cached_tokens=details.get("cached_tokens", 0),
        num_output_tokens=usage.get("completion_tokens", 0),
        finish_reason=finish_reason,
    )


def _message_of(body: Mapping[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message", error)) if isinstance(error, Mapping) else str(error)


def _reason(text: str) -> str:
    """The message of an error body in OpenAI's shape, else its first line."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError:
        return text.strip().split("\n")[0][:200] or "no explanation"
    return _message_of(body) if isinstance(body, Mapping) and "error" in body else text[:200]
