"""Events are the same however the bytes were cut, and only what a user would see counts as a token."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.bench.sse import SSEParser, decode_chunk, error_message

STREAM = (
    b": hello\n\nevent: x\ndata: one\n\ndata:two\r\n\r\n"
    b"data: three\ndata: more\n\nid: 7\n\ndata: \xe4\xbd\xa0\n\ndata: [DONE]\n\n"
)
EVENTS = [b"one", b"two", b"three\nmore", "你".encode(), b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_how_the_bytes_are_cut(cuts: list[int]) -> None:
    parser = SSEParser()
    borders = [0, *sorted(cuts), len(STREAM)]
    found = [event for start, end in itertools.pairwise(borders) for event in parser.feed(STREAM[start:end])]
    assert found == EVENTS


def test_an_event_is_given_out_only_when_it_is_complete() -> None:
    parser = SSEParser()
    assert parser.feed(b"data: half") == []
    assert parser.feed(b" of it\n") == []
    assert parser.feed(b"\n") == [b"half of it"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (b'{"delta":{"role":"assistant"}}', False),
        (b'{"delta":{"content":""}}', False),
        (b'{"delta":{"content":null},"finish_reason":"stop"}', False),
        (b'{"delta":{"tool_calls":[]}}', False),
        (b'{"delta":{}}', False),
        (b'{"text":""}', False),
        (b'{"delta":{"content":" "}}', True),
        (b'{"delta":{"reasoning_content":"so"}}', True),
        (b'{"delta":{"reasoning":"so"}}', True),
        (b'{"delta":{"refusal":"no"}}', True),
        (b'{"delta":{"tool_calls":[{"index":0}]}}', True),
        (b'{"text":"a"}', True),
    ],
)
def test_what_counts_as_a_token(choice: bytes, expected: bool) -> None:
    chunk = decode_chunk(b'{"choices":[' + choice + b"]}")
    assert chunk.choices is not None
    assert chunk.choices[0].says_something is expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"error":{"message":"too long","type":"x"}}', "too long"),
        (b'{"detail":"not found"}', "not found"),
        (b'{"error":"plain"}', "plain"),
        (b"<html>502</html>", "<html>502</html>"),
        (b"", "empty answer"),
    ],
)
def test_error_messages_of_many_servers(body: bytes, expected: str) -> None:
    assert error_message(body) == expected
