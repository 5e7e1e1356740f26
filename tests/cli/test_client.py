"""The terminal's client against a real HTTP server of the standard library that plays a chat server's part."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner

from headstart.cli.client import AddressError, Client, ServerError, parse_server_timing, read_events
from headstart.cli.group import group


class ChatServer(ThreadingHTTPServer):
    """Answers from `events`; remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.events: list[dict[str, Any]] = []
        self.status = 200
        self.failure = b""
        self.asked: list[tuple[str, dict[str, str], Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers), None))
        self._send(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, dict(self.headers), body))
        if self.server.status != 200:
            self._send(self.server.status, self.server.failure)
            return
        lines = [f"data: {json.dumps(event)}\n\n" for event in self.server.events]
        self._send(200, "".join([": a comment\n\n", *lines, "data: [DONE]\n\n"]).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Server-Timing", 'queue;desc="waiting";dur=1.5, prefill;dur=20')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def piece(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
}


def test_an_answer_with_its_numbers(server: ChatServer) -> None:
    server.events = [piece(""), piece("Hel"), piece("lo 你好", "stop"), USAGE]
    seen: list[str] = []
    messages = [{"role": "user", "content": "hi"}]
    answer = Client(server.url, api_key="secret").chat("tiny", messages, on_text=seen.append, max_tokens=5)
    assert seen == ["Hel", "lo 你好"]
    assert answer.text == "Hello 你好"
    assert answer.timing == (("queue", 0.0015), ("prefill", 0.02))
    assert (answer.num_prompt_tokens, answer.num_cached_tokens, answer.num_output_tokens) == (9, 4, 2)
    assert answer.finish_reason == "stop"
    assert 0 < answer.ttft <= answer.total
    assert answer.tpot == pytest.approx(answer.total - answer.ttft)
    path, headers, body = server.asked[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert body["messages"] == messages
    assert (body["stream"], body["max_tokens"]) == (True, 5)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_url_may_end_as_people_write_it(server: ChatServer, suffix: str) -> None:
    assert Client(server.url + suffix).models() == ["tiny"]
    assert server.asked[0][0] == "/v1/models"


def test_readiness(server: ChatServer) -> None:
    assert Client(server.url).is_ready()
    assert server.asked[0][0] == "/ready"


def test_a_refusal_carries_the_servers_reason(server: ChatServer) -> None:
    server.status, server.failure = 400, b'{"error": {"message": "the prompt is too long"}}'
    with pytest.raises(ServerError, match="answered 400: the prompt is too long"):
        Client(server.url).chat("tiny", [])
    server.failure = b"<html>\nproxy"
    with pytest.raises(ServerError, match=r"answered 400: <html>$"):
        Client(server.url).chat("tiny", [])


def test_an_error_in_the_middle_of_a_stream(server: ChatServer) -> None:
    server.events = [piece("Hel"), {"error": {"message": "the engine stopped"}}]
    with pytest.raises(ServerError, match="the engine stopped"):
        Client(server.url).chat("tiny", [])


def test_nothing_listens(server: ChatServer) -> None:
    url = server.url
    server.server_close()
    assert not Client(url).is_ready()
    with pytest.raises(ServerError, match=r"cannot reach http://127\.0\.0\.1:\d+: Connection refused"):
        Client(url).models()


@pytest.mark.parametrize("url", ["", "ftp://host", "http://"])
def test_what_is_no_url_of_a_server(url: str) -> None:
    with pytest.raises(ServerError, match="is not the URL of a server"):
        Client(url)


def test_server_timing_entries_without_a_duration_are_left_out() -> None:
    assert parse_server_timing("") == ()
    assert parse_server_timing('cache;desc=hit, load;dur="0.5";desc=x') == (("load", 0.0005),)


def test_what_comes_after_done_is_not_read() -> None:
    lines = iter([b"data: {}\n", b"\n", b"event: x\n", b"data: [DONE]\n", b"data: nonsense\n"])
    assert list(read_events(lines)) == [{}]


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://a:99999", "http://a:b"])
def test_an_address_of_no_server(url: str) -> None:
    with pytest.raises(AddressError, match="not the URL of a server"):
        Client(url)


def test_a_key_that_no_header_carries() -> None:
    with pytest.raises(AddressError, match="no HTTP header"):
        Client("http://a", api_key="clé")


def test_a_line_that_is_no_text_is_asked_all_the_same(server: ChatServer) -> None:
    server.events = [piece("yes", "stop"), USAGE]
    result = CliRunner().invoke(group, ["chat", "--url", server.url], input=b"caf\xe9 \xff\nand on\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "yes\nyes\n"
    assert server.asked[1][2]["messages"] == [{"role": "user", "content": "caf\ufffd \ufffd"}]
