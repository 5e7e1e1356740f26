"""The little HTTP that the endpoints share: bodies in, JSON out, and knowing at once when the client is gone."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from types import TracebackType
from typing import Any, Self

import msgspec
from starlette.types import Receive, Scope, Send

from headstart.server.errors import ApiError, Headers

logger = logging.getLogger("headstart.server")
RECEIVED = "headstart.received"  # scope key: monotonic seconds at which the request's first byte was seen
HOLD_NEXT_WRITE = "headstart.hold_next_write"  # scope key: a function; what is written next goes out with what follows
REQUEST_ID = "headstart.request_id"  # scope key: what x-request-id says
REFUSED = "headstart.refused"  # scope key: the status that the connection itself gave, while the body was awaited
_SANE_ID = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
_JSON = (b"content-type", b"application/json")
_BODY_BASE, _BODY_BYTES_PER_TOKEN, _BODY_MOST = 1 << 20, 32, 1 << 24
_DRAIN_BYTES, _DRAIN_SECONDS = 64 * 1024 * 1024, 1.0


def received_at(scope: Scope) -> float:
    """When the request began; the server's protocol stamps it, any other ASGI server has no earlier moment than now."""
    stamp = scope.get(RECEIVED)
    return stamp if isinstance(stamp, float) else time.monotonic()


def header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def request_id(scope: Scope) -> str:
    """The client's `x-request-id` where it is sane (printable, at most 128 characters), else one of ours."""
    if REQUEST_ID not in scope:
        given = header(scope, b"x-request-id")
        sane = given is not None and _SANE_ID.fullmatch(given)
        scope[REQUEST_ID] = given.decode("ascii") if given is not None and sane else uuid.uuid4().hex
    value = scope[REQUEST_ID]
    assert isinstance(value, str)
    return value


def default_body_limit(max_model_len: int) -> int:
    """Bytes. JSON is decoded in one go, about 10 ms a MiB in which nobody's token leaves; a token of text takes about
    four bytes, up to 24 when escaped."""
    return min(_BODY_BASE + _BODY_BYTES_PER_TOKEN * max_model_len, _BODY_MOST)


async def read_json_body(scope: Scope, receive: Receive, limit: int) -> bytearray:
    """The whole body, refused as soon as it is known to be too long (413) and unless it is said to be JSON (415).

    The media type is required because a browser sends any other one across origins without asking first.
    Raises `ClientGoneError` when the client leaves before the body is complete.
    """
    kind = (header(scope, b"content-type") or b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(415, "the Content-Type must be application/json", code="unsupported_media_type")
    length = header(scope, b"content-length")
    if length is not None and int(length) > limit:
        raise _too_large(limit)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return body


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body is longer than {limit} bytes; send less or raise --max-body-bytes",
        code="body_too_large",
        headers=((b"connection", b"close"),),
    )


async def send_body(send: Send, status: int, body: bytes, headers: Headers = (), *, kind: Any = _JSON) -> None:
    start = (kind, (b"content-length", str(len(body)).encode()), *headers)
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: Any, headers: Headers = ()) -> None:
    await send_body(send, 200, msgspec.json.encode(value), headers)


async def send_error(send: Send, error: ApiError, headers: Headers = (), receive: Receive | None = None) -> None:
    """Answer with `error`. With `receive`, swallow what the client still sends for a moment before the connection
    closes: a close with unread data would reset it, and the client would never see the answer."""
    body = error.body()
    start = (_JSON, (b"content-length", str(len(body)).encode()), *error.headers, *headers)
    await send({"type": "http.response.start", "status": error.status, "headers": start})
    await send({"type": "http.response.body", "body": body, "more_body": receive is not None})
    if receive is not None:
        await _drain(receive)
        await send({"type": "http.response.body", "body": b""})


async def _drain(receive: Receive) -> None:
    left = _DRAIN_BYTES
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody to answer."""


class WatchClient:
    """`async with WatchClient(receive)`: the block is cancelled, and `ClientGoneError` raised, once the client leaves.

    The block must not suspend after it has sent its response's last byte: a server reports the end of the response as a
    disconnect too.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if self._gone and self._task.uncancel() == 0 and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise ClientGoneError from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()
