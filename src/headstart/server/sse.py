"""Server-sent events: what is the same in every chunk of a stream is encoded once. Knows no field of a choice."""

from __future__ import annotations

from typing import Any

import msgspec

from headstart.server.errors import ApiError

DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the first tokens back
)

encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    return b"data: %b\n\n" % encode(value)


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that broke; no `[DONE]` follows."""
    return b"event: error\ndata: %b\n\n" % error.body()


class ChunkFrame:
    """The bytes around the choices of each chunk: `head` has the fields before them, `tail` those after."""

    def __init__(self, head: dict[str, Any], tail: dict[str, Any]) -> None:
        self.opening = b"data: %b," % encode(head)[:-1] + b'"choices":['
        self.closing = b"]," % () + encode(tail)[1:] + b"\n\n" if tail else b"]}\n\n"
        self._head = head

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk without choices that ends a stream whose caller asked for the usage."""
        return event({**self._head, "choices": [], "usage": usage})
