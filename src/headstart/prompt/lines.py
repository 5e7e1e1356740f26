"""Requests from a JSONL file, line by line within bounds. What cannot be read is told and does no harm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, NamedTuple

import msgspec

from headstart.prompt.request import PromptRequest, RequestError, parse_request

MAX_LINE_BYTES = 1 << 26


class Line(NamedTuple):
    """Line `number` (from 1) of a file: its request, or what is wrong with it."""

    number: int
    request: PromptRequest | None
    error: str = ""


def read_requests(stream: IO[bytes]) -> Iterator[Line]:
    """The lines of `stream` that are not empty."""
    number = 0
    while data := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
            while (rest := stream.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield Line(number, None, f"is longer than {MAX_LINE_BYTES >> 20} MiB")
        elif data.strip():
            yield _read(number, data)


def _read(number: int, data: bytes) -> Line:
    try:
        return Line(number, parse_request(msgspec.json.decode(data)))
    except RequestError as error:
        return Line(number, None, str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Line(number, None, f"is no JSON: {error}")
    except RecursionError:
        return Line(number, None, "is nested too deeply")
