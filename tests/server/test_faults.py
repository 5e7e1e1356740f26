"""Clients that leave or do not read, engines that refuse or die, servers that are told to stop."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from typing import Any

import httpx
import openai
import pytest

from headstart.core.request import FinishReason
from headstart.core.step import RequestOutput
from headstart.engine import EngineDeadError, EngineState, QueueFullError, RequestRefused
from tests.server.conftest import SENTENCE, Start
from tests.server.harness import Running, error_of, events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def raw_request(route: str, body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {route} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@pytest.mark.parametrize("abrupt", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_leaves_while_headers_are_held(start: Start, streaming: bool, abrupt: bool) -> None:
    running, engine = start()
    engine.gate = running.call(asyncio.Event)
    client = running.connect()
    client.sendall(raw_request(CHAT, {"messages": MESSAGES, "stream": streaming, "n": 3}))
    engine.wait_until(lambda: len(engine.running) >= 1)
    if abrupt:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    engine.wait_until(lambda: not engine.running)
    assert engine.aborted
    running.call(engine.gate.set)
    assert running.client.post(CHAT, json={"messages": MESSAGES}).status_code == 200
    metrics = running.client.get("/metrics").text
    assert 'headstart_http_responses_total{route="/v1/chat/completions",status="499"} 1' in metrics
    assert 'headstart_requests_finished_total{finish_reason="abort"} 3' in metrics


def test_a_client_that_leaves_in_the_middle_of_a_stream(start: Start) -> None:
    running, engine = start()
    gates = running.call(lambda: [asyncio.Event() for _ in range(2)])
    outputs = engine._outputs

    async def slow(request: Any) -> Any:
        async for output in outputs(request):
            yield output
            await gates[0].wait()

    engine._outputs = slow  # type: ignore[method-assign]
    client = running.connect()
    client.sendall(raw_request(CHAT, {"messages": MESSAGES, "stream": True}))
    received = b""
    while b" One" not in received:
        received += client.recv(4096)
    client.close()
    engine.wait_until(lambda: not engine.running)
    assert len(engine.aborted) == 1


def test_a_client_that_leaves_before_its_body_is_complete(start: Start) -> None:
    running, engine = start()
    client = running.connect()
    client.sendall(raw_request(CHAT, {"messages": MESSAGES})[:-5])
    client.close()
    assert running.client.post(CHAT, json={"messages": MESSAGES}).status_code == 200
    assert len(engine.requests) == 1


def test_a_client_that_does_not_read_holds_nobody_up(start: Start) -> None:
    running, engine = start()
    sentence = engine.answer(None)  # type: ignore[arg-type]
    engine.answer = lambda request: tuple(sentence[:5]) * 20_000 if request.priority else sentence
    slow = running.connect()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = {"messages": MESSAGES, "stream": True, "priority": 1, "max_tokens": 100_000}
    engine.info = type(engine.info)(1 << 20, 1 << 17, 16, 512, True, "scripted")
    slow.sendall(raw_request(CHAT, body))
    engine.wait_until(lambda: len(engine.running) == 1)
    for _ in range(3):
        answer = running.client.post(CHAT, json={"messages": MESSAGES}).json()
        assert answer["choices"][0]["message"]["content"] == SENTENCE
    assert len(engine.running) == 1, "the slow one waits for its client: nothing piles up without bounds"
    slow.close()
    engine.wait_until(lambda: not engine.running)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFullError(4096, 4096), 429, "queue_full"),
        (EngineDeadError("killed by SIGKILL"), 503, "engine_dead"),
        (RequestRefused("no"), 400, "request_refused"),
        (ZeroDivisionError("a secret of ours"), 500, "internal_error"),
    ],
)
def test_refusals_have_a_status_also_when_streaming(
    start: Start, error: Exception, status: int, code: str, streaming: bool
) -> None:
    running, _ = start(refuse=error)
    for route, body in ((CHAT, {"messages": MESSAGES, "n": 2}), (TEXT, {"prompt": ["a", "b"]})):
        response = running.client.post(route, json={**body, "stream": streaming})
        assert response.status_code == status
        assert error_of(response)["code"] == code
        assert "secret" not in response.text
        assert ("retry-after" in response.headers) == (status == 429)
        assert "4096" in response.text or status != 429


def test_a_dead_engine_ends_streams_with_an_error_event(start: Start) -> None:
    running, engine = start(break_after=(3, EngineDeadError("gone")))
    response = running.client.post(CHAT, json={"messages": MESSAGES, "stream": True})
    assert response.status_code == 200
    *before, last = events(response.text)
    assert len(before) == 3
    assert last["error"]["code"] == "engine_dead"
    assert "event: error\n" in response.text
    assert "[DONE]" not in response.text
    response = running.client.post(CHAT, json={"messages": MESSAGES})
    assert response.status_code == 503
    assert error_of(response)["type"] == "server_error"
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.APIError, match="engine has stopped"), client:
        list(client.chat.completions.create(model="stories", messages=[{"role": "user", "content": "x"}], stream=True))
    assert not engine.running


def test_the_state_of_the_engine_shows(start: Start) -> None:
    running, engine = start(state=EngineState.STARTING)
    client = running.client
    assert client.get("/health").status_code == 200
    assert (client.get("/ready").status_code, client.get("/ready").json()) == (503, {"status": "starting"})
    response = client.post(CHAT, json={"messages": MESSAGES})
    assert response.status_code == 503
    assert error_of(response)["code"] == "engine_starting"
    assert "retry-after" in response.headers
    assert client.get("/v1/models").json()["data"][0].get("max_model_len") is None
    engine.state = EngineState.READY
    assert client.get("/ready").status_code == 200
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 512
    assert client.get("/v1/models/stories").json()["object"] == "model"
    engine.state = EngineState.DEAD
    assert client.get("/health").status_code == 503
    assert client.get("/ready").status_code == 503
    assert error_of(client.post(CHAT, json={"messages": MESSAGES}))["code"] == "engine_dead"
    assert "headstart_engine_up 0" in client.get("/metrics").text


def test_an_engine_that_gives_up_a_running_request(start: Start) -> None:
    running, engine = start()
    for reason, code in ((FinishReason.ABORT, "shutting_down"), (FinishReason.ERROR, "generation_failed")):
        engine.end = RequestOutput(
            "", finish_reason=reason, error="bad logits" if reason is FinishReason.ERROR else None
        )
        response = running.client.post(CHAT, json={"messages": MESSAGES, "stream": True, "max_tokens": 3})
        assert events(response.text)[-1]["error"]["code"] == code
        response = running.client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 3})
        assert response.status_code == (500 if reason is FinishReason.ERROR else 503)


def read_all(client: socket.socket) -> bytes:
    data = b""
    while piece := client.recv(65536):
        data += piece
    return data


def test_requests_in_flight_finish_when_the_server_is_stopped(start: Start) -> None:
    running, engine = start(grace_seconds=10)
    engine.gate = running.call(asyncio.Event)
    client = running.connect()
    client.sendall(raw_request(CHAT, {"messages": MESSAGES, "stream": True}))
    engine.wait_until(lambda: len(engine.running) == 1)
    running.loop.call_soon_threadsafe(running.loop.call_later, 0.3, engine.gate.set)
    running.stop()
    assert b"[DONE]" in read_all(client)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{running.url}/health", trust_env=False)


@pytest.mark.parametrize("begun", [False, True])
def test_requests_that_outlast_the_grace_are_told(start: Start, begun: bool) -> None:
    running, engine = start(grace_seconds=1)
    never = running.call(asyncio.Event)
    outputs = engine._outputs

    async def stuck(request: Any) -> Any:
        async for output in outputs(request):
            if begun:
                yield output
            await never.wait()

    engine._outputs = stuck  # type: ignore[method-assign]
    client = running.connect()
    client.sendall(raw_request(CHAT, {"messages": MESSAGES, "stream": True}))
    engine.wait_until(lambda: len(engine.running) == 1)
    if begun:
        received = b""
        while b" One" not in received:
            received += client.recv(4096)
    running.stop()
    data = read_all(client)
    assert b"shutting_down" in data
    assert (b"503" in data) == (not begun)
    assert engine.aborted


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZZ\r\n",
        b"A" * 200_000,
    ],
    ids=range(5),
)
def test_garbage_on_the_socket(shared: Running, garbage: bytes) -> None:
    with shared.connect() as client:
        try:
            client.sendall(garbage)
            client.shutdown(socket.SHUT_WR)
            read_all(client)
        except OSError:
            pass
    assert shared.client.post(CHAT, json={"messages": MESSAGES}).status_code == 200


def test_pipelined_requests_are_answered_in_turn(shared: Running) -> None:
    with shared.connect() as client:
        client.sendall(raw_request(TEXT, {"prompt": "a"}) * 3)
        data = b""
        while data.count(b"text_completion") < 3:
            data += client.recv(65536)
    assert data.count(b"HTTP/1.1 200") == 3


def test_chunks_go_out_when_they_are_made(start: Start) -> None:
    """Each token is written at once: the client has one while the engine is kept from making the next."""
    running, engine = start()
    steps = running.call(lambda: asyncio.Semaphore(0))
    outputs = engine._outputs

    async def stepped(request: Any) -> Any:
        async for output in outputs(request):
            await steps.acquire()
            yield output

    engine._outputs = stepped  # type: ignore[method-assign]
    seen: list[str] = []
    running.call(steps.release)
    with running.client.stream("POST", CHAT, json={"messages": MESSAGES, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                seen.append(line)
                for _ in range(4):  # a character of four bytes takes four tokens
                    running.call(steps.release)
    assert len(seen) > 10


def test_the_ledger_sums_to_what_the_client_sees(start: Start) -> None:
    running, engine = start()
    engine.gate = running.call(asyncio.Event)
    running.loop.call_soon_threadsafe(running.loop.call_later, 0.2, engine.gate.set)
    began = time.monotonic()
    with running.client.stream("POST", CHAT, json={"messages": MESSAGES, "stream": True}) as response:
        seen = time.monotonic() - began
        parts = [float(entry.split("=")[1]) / 1000 for entry in response.headers["server-timing"].split(",")]
    assert 0.19 < sum(parts) <= seen
