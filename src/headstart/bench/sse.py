"""Server-sent events and the chunks of OpenAI's streams: bytes in, typed chunks out. Knows no clock and no socket."""

from __future__ import annotations

import msgspec


class SSEParser:
    """Incremental: `feed` returns the data of every event that is now complete, and nothing of other fields."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        buffer = self._buffer + data if self._buffer else data
        if b"\r" in buffer:
            tail = b"\r" if buffer.endswith(b"\r") else b""  # its line feed may still come
            buffer = buffer.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n") + tail
        *events, self._buffer = buffer.split(b"\n\n")
        return [payload for payload in map(_payload, events) if payload is not None]


def _payload(event: bytes) -> bytes | None:
    if b"\n" not in event and event.startswith(b"data: "):  # nearly all of them
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    ttft_ms: float | None = None  # headstart: the ledger's sum, and its parts
    ttft_ledger: dict[str, float] | None = None
    predicted_ttft_ms: float | None = None


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct):
    delta: Delta | None = None
    message: Delta | None = None  # of an answer that is not streamed
    text: str | None = None
    finish_reason: str | None = None

    @property
    def says_something(self) -> bool:
        """Whether a user would see this: role-only and empty chunks are not a first token."""
        if self.text:
            return True
        delta = self.delta
        return delta is not None and bool(
            delta.content or delta.reasoning_content or delta.reasoning or delta.refusal or delta.tool_calls
        )


class Chunk(msgspec.Struct):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: msgspec.Raw | None = None


decode_chunk = msgspec.json.Decoder(Chunk).decode  # raises msgspec.DecodeError


def error_message(body: bytes) -> str:
    """The message in an error's body, whatever shape the server gave it; at most 300 characters."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode("utf-8", "replace").strip()[:300] or "empty answer"
    for _ in range(2):
        if isinstance(value, dict):
            value = value.get("error") or value.get("message") or value.get("detail") or value
    return str(value)[:300]
