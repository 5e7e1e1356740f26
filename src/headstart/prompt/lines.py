"""Requests from a JSONL file, line by line within bounds. What cannot be read is told and does no harm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, NamedTuple

from headstart.prompt.chat import ChatPrompt, PromptError, read_request

MAX_LINE_BYTES = 1 << 26
MAX_LINES = 1_000_000


class Line(NamedTuple):
    """Line `number` (from 1) of a file: its request, or what is wrong with it."""

    number: int
    prompt: ChatPrompt | None
    error: str = ""


def read_lines(stream: IO[bytes]) -> Iterator[Line]:
    """The lines of `stream` that are not empty; the last one tells where a too long file was left."""
    number = 0
    while data := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number > MAX_LINES:
            yield Line(
                number, None, f"and all that follow are left out: at most {MAX_LINES:,} lines are read; split it"
            )
            return
        if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
            while (rest := stream.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield Line(number, None, f"is longer than {MAX_LINE_BYTES >> 20} MiB")
        elif data.strip():
            yield _read(number, data)


def _read(number: int, data: bytes) -> Line:
    try:
        return Line(number, read_request(json.loads(data)))
    except PromptError as error:
        return Line(number, None, str(error))
    except RecursionError:
        return Line(number, None, "is nested too deeply")
    except ValueError as error:  # no JSON, no UTF-8, a number of too many digits
        return Line(number, None, f"is no JSON: {error}")
