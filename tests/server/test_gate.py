"""Who may come in and with how much: API keys, origins, body sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from headstart.config import ServerConfig
from tests.server.conftest import Start
from tests.server.harness import Running, error_of

TEXT = "/v1/completions"
PROTECTED = [("POST", TEXT), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("POST", "/tokenize")]
PROTECTED += [("POST", "/detokenize"), ("GET", "/metrics"), ("GET", "/nothing")]


@pytest.fixture
def locked(start: Start) -> Running:
    running, _ = start(
        server=ServerConfig(api_keys=("first-key", "zweiter-schlüssel"), cors_origins=("https://a.example",))
    )
    return running


@pytest.mark.parametrize(("method", "path"), PROTECTED)
@pytest.mark.parametrize("given", [None, "Bearer", "Bearer wrong", "Bearer first-ke", "Basic first-key", "first-key"])
def test_without_a_key_there_is_nothing(locked: Running, method: str, path: str, given: str | None) -> None:
    headers = {} if given is None else {"authorization": given}
    response = locked.client.request(method, path, headers=headers, json={"prompt": "x"} if method == "POST" else None)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = error_of(response)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert "first-key" not in response.text


def test_every_key_opens_and_probes_need_none(locked: Running) -> None:
    for key in ("Bearer first-key", "bearer first-key", "Bearer zweiter-schlüssel"):
        headers = {"authorization": key.encode()}
        assert locked.client.post(TEXT, json={"prompt": "x"}, headers=headers).status_code == 200
        assert locked.client.get("/metrics", headers=headers).status_code == 200
    assert locked.client.get("/health").status_code == 200
    assert locked.client.get("/ready").status_code == 200


def test_origins(locked: Running) -> None:
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    allowed = locked.client.options(TEXT, headers={"origin": "https://a.example", **preflight})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    refused = locked.client.options(TEXT, headers={"origin": "https://b.example", **preflight})
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers
    headers = {"origin": "https://a.example", "authorization": "Bearer first-key"}
    answer = locked.client.post(TEXT, json={"prompt": "x"}, headers=headers)
    assert "server-timing" in answer.headers["access-control-expose-headers"]
    unknown = locked.client.post(TEXT, json={"prompt": "x"}, headers={"origin": "https://a.example"})
    assert unknown.status_code == 401
    assert unknown.headers["access-control-allow-origin"] == "https://a.example"


def test_no_origin_is_allowed_unless_told(shared: Running) -> None:
    answer = shared.client.post(TEXT, json={"prompt": "x"}, headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.fixture
def small(start: Start) -> Running:
    running, _ = start(server=ServerConfig(max_body_bytes=10_000))
    return running


def body_of(size: int) -> bytes:
    empty = len(json.dumps({"prompt": "x", "pad": ""}))
    body = json.dumps({"prompt": "x", "pad": "y" * (size - empty)}).encode()
    assert len(body) == size
    return body


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("route", [TEXT, "/tokenize"])
def test_a_body_at_the_limit_and_one_byte_more(small: Running, route: str) -> None:
    assert small.client.post(route, content=body_of(10_000), headers=JSON).status_code == 200
    response = small.client.post(route, content=body_of(10_001), headers=JSON)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"
    assert "10000" in error_of(response)["message"]


def test_the_operator_bounds_priorities(start: Start, shared: Running) -> None:
    for priority in (-10, 10):
        assert shared.client.post(TEXT, json={"prompt": "x", "priority": priority}).status_code == 200
    refused = shared.client.post(TEXT, json={"prompt": "x", "priority": -11})
    assert refused.status_code == 400
    assert error_of(refused)["message"] == "priority is -11; it must be from -10 to 10"
    running, engine = start(server=ServerConfig(max_priority=1000))
    assert running.client.post(TEXT, json={"prompt": "x", "priority": -1000}).status_code == 200
    assert engine.requests[0].priority == -1000


def test_a_chunked_body_is_counted_while_it_comes(small: Running) -> None:
    def pieces(size: int) -> Iterator[bytes]:
        body = body_of(size)
        for begin in range(0, size, 1000):
            yield body[begin : begin + 1000]

    assert small.client.post(TEXT, content=pieces(10_000), headers=JSON).status_code == 200
    for size in (10_001, 3_000_000):
        response = small.client.post(TEXT, content=pieces(size), headers=JSON)
        assert response.status_code == 413
        assert error_of(response)["code"] == "body_too_large"
    assert small.client.post(TEXT, content=body_of(100), headers=JSON).status_code == 200


def test_an_endless_body_is_cut_off(small: Running) -> None:
    with small.connect() as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        chunk = b"2710\r\n" + b"y" * 10_000 + b"\r\n"
        client.sendall(chunk * 3)
        data = b""
        while piece := client.recv(65536):  # ends: the server closes although the body has not
            data += piece
    assert data.startswith(b"HTTP/1.1 413")


def test_a_client_that_announces_too_much_is_refused_before_it_sends(small: Running) -> None:
    with small.connect() as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 99999999\r\nexpect: 100-continue\r\n\r\n"
        )
        assert client.recv(65536).startswith(b"HTTP/1.1 413")
