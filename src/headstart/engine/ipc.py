"""What passes between the API process and an engine process: message types, their encoding, the two socket ends.

msgpack over ZeroMQ over a Unix socket in a private directory. Every message is decoded against its type, so nothing is
executed, whatever arrives. It must not know what the messages make anybody do.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from headstart.core.forecast import Forecast
from headstart.core.request import EngineRequest
from headstart.core.stats import CoreStats
from headstart.core.step import RequestOutput

# A prompt of ten million tokens (the largest context that the configuration allows) takes 50 MB.
MAX_MESSAGE_BYTES = 256 * 1024 * 1024

_MAX_SOCKET_PATH = 100  # the system's limit is 104 to 108 bytes


class IPCError(RuntimeError):
    """A message that is too large, or bytes that are no message."""


class NotConnectedError(IPCError):
    """There is nobody at the other end."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine can do. Lengths are in tokens; `num_kv_tokens` is what the KV pool holds."""

    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    prefix_cache: bool
    summary: str  # device, dtype, memory: one line for people

    @property
    def num_kv_tokens(self) -> int:
        return self.num_blocks * self.block_size


class Add(msgspec.Struct, frozen=True, tag="add", array_like=True):
    """To the engine: a new request. It is answered by outputs, the last with a finish reason, or by `Refused`."""

    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """To the engine: forget these requests. Ids that it does not know (any more) are no error."""

    request_ids: tuple[str, ...]


class Ping(msgspec.Struct, frozen=True, tag="ping", array_like=True):
    """To the engine: answer at once with `Pong` and the same number."""

    number: int


class Estimate(msgspec.Struct, frozen=True, tag="estimate", array_like=True):
    """To the engine: answer with `Estimated` and the same number. The request is not added."""

    number: int
    request: EngineRequest


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", array_like=True):
    """To the engine: stop after the step that runs now, without finishing requests."""


class Progress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    """From the engine while it starts: how far a stage is (see `hub.Progress`)."""

    stage: str
    done: int
    total: int | None


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """From the engine: loaded and warmed up."""

    info: EngineInfo
    stats: CoreStats


class Outputs(msgspec.Struct, frozen=True, tag="outputs", array_like=True):
    """From the engine: the news of one step (perhaps of no request), and where the engine stands after it."""

    outputs: tuple[RequestOutput, ...]
    stats: CoreStats


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """From the engine: this request was not added.

    `queue_full` has (num_waiting, limit) if that is why; `slo_miss` (predicted, slo, retry_after) in seconds.
    """

    request_id: str
    message: str
    queue_full: tuple[int, int] | None = None
    slo_miss: tuple[float, float, float] | None = None


class Pong(msgspec.Struct, frozen=True, tag="pong", array_like=True):
    number: int
    stats: CoreStats


class Estimated(msgspec.Struct, frozen=True, tag="estimated", array_like=True):
    """From the engine: what was asked for, or, if the request could never run, why."""

    number: int
    forecast: Forecast | None
    refusal: str = ""


class Dead(msgspec.Struct, frozen=True, tag="dead", array_like=True):
    """From the engine, its last words. `startup`: it never became ready, and `message` is for the user as it is."""

    message: str
    startup: bool = False


ToEngine = Add | Abort | Ping | Estimate | Shutdown
FromEngine = Progress | Ready | Outputs | Refused | Pong | Estimated | Dead

_Send = TypeVar("_Send")
_Recv = TypeVar("_Recv")


class Codec(Generic[_Send, _Recv]):
    """Encodes one direction's messages and decodes the other's. Stateless apart from msgspec's prepared tables."""

    def __init__(self, receives: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[_Recv] = msgspec.msgpack.Decoder(receives)

    def encode(self, message: _Send) -> bytes:
        """Raises `IPCError` for what msgpack cannot hold (integers past 64 bits, half surrogate pairs) or too much."""
        try:
            data = self._encoder.encode(message)
        except (OverflowError, UnicodeEncodeError, TypeError) as error:
            raise IPCError(f"cannot send {type(message).__name__}: {error}") from error
        if len(data) > MAX_MESSAGE_BYTES:
            raise IPCError(f"{type(message).__name__} takes {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
        return data

    def decode(self, data: bytes) -> _Recv:
        """Raises `IPCError` for bytes that are no message of this direction."""
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise IPCError(f"received {len(data)} bytes that are no message: {error}") from error


def api_codec() -> Codec[ToEngine, FromEngine]:
    """The API process' side."""
    return Codec(FromEngine)


def engine_codec() -> Codec[FromEngine, ToEngine]:
    """The engine process' side."""
    return Codec(ToEngine)


class SocketDirectory:
    """A directory that only this user can enter (0700), with the address of the one socket in it."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="headstart-")
        if len(os.fsencode(self._socket_path)) > _MAX_SOCKET_PATH:  # a deep TMPDIR
            os.rmdir(self.path)
            self.path = tempfile.mkdtemp(prefix="headstart-", dir="/tmp")

    @property
    def _socket_path(self) -> str:
        return os.path.join(self.path, "engine.sock")

    @property
    def address(self) -> str:
        return f"ipc://{self._socket_path}"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class Channel(Generic[_Send, _Recv]):
    """One end of the connection. Not thread-safe, except `wake`. The side that binds is the API process."""

    def __init__(self, codec: Codec[_Send, _Recv], address: str, *, bind: bool) -> None:
        self._codec = codec
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        # No high-water mark: what is in flight is bounded by the limit on requests and by each one's max_tokens, and a
        # blocking send would let one process freeze the other.
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        if bind:
            self._socket.bind(address)
        else:
            self._socket.connect(address)

    @property
    def fileno(self) -> int:
        """Readable when the socket *may* have news. Edge-triggered: receive until None, also after each send."""
        return int(self._socket.get(zmq.FD))

    def send(self, message: _Send) -> None:
        """Never blocks. Raises `IPCError` if the message cannot be encoded, `NotConnectedError` if nobody is there."""
        data = self._codec.encode(message)
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            raise NotConnectedError("nobody is connected") from None

    def receive(self) -> _Recv | None:
        """The next message, or None if there is none now. Raises `IPCError` for bytes that are no message."""
        try:
            data = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return self._codec.decode(data)

    def wait(self, timeout: float | None = None) -> None:
        """Block until a message is there, `wake` was called or `timeout` seconds are over."""
        self._poller.poll(None if timeout is None else math.ceil(timeout * 1000))
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._wake_read, 4096)) == 4096:
                pass

    def wake(self) -> None:
        """Make `wait` return, now or the next time. From any thread."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full: it will wake anyway
            os.write(self._wake_write, b"\0")

    def close(self, linger: float = 1.0) -> None:
        """Nobody may call `wake` any more. What is not sent within `linger` seconds is dropped."""
        self._socket.close(int(linger * 1000))
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)
