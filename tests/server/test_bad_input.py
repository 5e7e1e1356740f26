"""What bad input gets: a 4xx in OpenAI's shape that names the field, streaming or not, and a server that lives on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.harness import Running, error_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, fields]}


BOTH = [
    ("max_tokens", {"max_tokens": "many"}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": True}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 10**30}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 2.1}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": float("inf")}),
    ("top_p", {"top_p": 1.1}),
    ("top_p", {"top_p": -0.1}),
    ("top_p", {"top_p": float("nan")}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": 1.5}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("repetition_penalty", {"repetition_penalty": 11}),
    ("presence_penalty", {"presence_penalty": -2.5}),
    ("frequency_penalty", {"frequency_penalty": 2.5}),
    ("n", {"n": 0}),
    ("n", {"n": 17}),
    ("n", {"n": 1 << 70}),
    ("n", {"n": [1]}),
    ("seed", {"seed": -(1 << 63) - 1}),
    ("seed", {"seed": 1 << 64}),
    ("seed", {"seed": "x"}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": ["x"] * 17}),
    ("stop", {"stop": ["x" * 1001]}),
    ("stop[0]", {"stop": [1]}),
    ("stop", {"stop": {"a": 1}}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": [512]}),
    ("stop_token_ids", {"stop_token_ids": [1] * 129}),
    ("stop_token_ids[1]", {"stop_token_ids": [1, "2"]}),
    ("logit_bias", {"logit_bias": {"x": 1}}),
    ("logit_bias", {"logit_bias": {"512": 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {"1": 101}}),
    ("logit_bias", {"logit_bias": {"1": "much"}}),
    ("logit_bias", {"logit_bias": {str(token): 1 for token in range(1025)}}),
    ("priority", {"priority": 1 << 40}),
    ("priority", {"priority": 11}),
    ("priority", {"priority": -11}),
    ("cache_salt", {"cache_salt": "x" * 257}),
    ("user", {"user": 7}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}, "stream": False}),
    ("stream_options.include_usage", {"stream_options": {"include_usage": 3}, "stream": True}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {}}}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("best_of", {"best_of": 2}),
    ("min_tokens", {"min_tokens": 4}),
    ("guided_json", {"guided_json": {}}),
    ("use_beam_search", {"use_beam_search": True}),
]
CHAT_ONLY = [
    ("messages", {"messages": []}),
    ("messages", {"messages": None}),
    ("messages", {"messages": "hi"}),
    ("messages[0]", {"messages": ["hi"]}),
    ("messages[1].role", message(role="robot", content="x")),
    ("messages[1].role", message(role=5, content="x")),
    ("messages[1].role", message(content="x")),
    ("messages[1].content", message(role="user")),
    ("messages[1].content", message(role="user", content=7)),
    ("messages[1].content", message(role="assistant", content=None)),
    ("messages[1].content[0]", message(role="user", content=["x"])),
    ("messages[1].content[0].type", message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}])),
    ("messages[1].content[0].text", message(role="user", content=[{"type": "text"}])),
    ("messages[1].tool_calls", message(role="assistant", tool_calls="x")),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": -1}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("logprobs", {"logprobs": 2}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("functions", {"functions": []}),
    ("audio", {"audio": {"voice": "alloy"}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("web_search_options", {"web_search_options": {}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
]
TEXT_ONLY = [
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": {}}),
    ("prompt", {"prompt": []}),
    ("prompt[0]", {"prompt": [[]]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [5, 512]}),
    ("prompt", {"prompt": [5, 10**40]}),
    ("prompt", {"prompt": [5, "x"]}),
    ("prompt", {"prompt": [True]}),
    ("prompt[0]", {"prompt": [1.5]}),
    ("prompt[1]", {"prompt": [[1], [512]]}),
    ("prompt[1]", {"prompt": [[1], "x"]}),
    ("prompt[0]", {"prompt": ["x", [1]]}),
    ("prompt[0]", {"prompt": [None]}),
    ("prompt", {"prompt": ["x"] * 1025}),
    ("n", {"prompt": ["x"] * 1024, "n": 2}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": True}),
    ("echo", {"echo": "x"}),
    ("max_tokens", {"max_tokens": -1, "echo": True}),
    ("suffix", {"suffix": "and so on"}),
    ("prompt_embeds", {"prompt_embeds": "x"}),
]
CASES = [
    *((CHAT, param, {"messages": USER, **body}) for param, body in [*BOTH, *CHAT_ONLY]),
    *((TEXT, param, {"prompt": "hi", **body}) for param, body in [*BOTH, *TEXT_ONLY]),
]


def post(running: Running, route: str, body: Any) -> Any:
    return running.client.post(route, content=json.dumps(body), headers={"content-type": "application/json"})


@pytest.mark.parametrize(("route", "param", "body"), CASES, ids=lambda value: str(value)[:60])
def test_a_bad_field_is_named(shared: Running, route: str, param: str, body: dict[str, Any]) -> None:
    for stream in (False, True):
        response = post(shared, route, {"stream": stream, **body} if "stream" not in body else body)
        assert response.status_code == 400, response.text
        error = error_of(response)
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert param in error["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"messages": }',
        b'{"a": 1} x',
        b'{"model": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"x": ' + b"[" * 100_000,
        b'{"x": ' + b"[" * 3_000 + b"]" * 3_000 + b"}",
    ],
    ids=lambda content: repr(content[:20]),
)
def test_a_body_that_is_no_json_object(shared: Running, content: bytes) -> None:
    for route in (CHAT, TEXT, "/tokenize", "/detokenize"):
        response = shared.client.post(route, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert "body" in error_of(response)["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "field"), [(CHAT, "messages"), (TEXT, "prompt")])
def test_a_prompt_longer_than_the_context(shared: Running, route: str, field: str, stream: bool) -> None:
    text = "day " * 700
    body = {"messages": [{"role": "user", "content": text}]} if route == CHAT else {"prompt": text}
    response = post(shared, route, {**body, "stream": stream})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    error = error_of(response)
    assert error["param"] == field
    assert error["code"] == "context_length_exceeded"
    count = len(shared.client.post("/tokenize", json={"prompt": text}).json()["tokens"])
    assert "512" in error["message"]
    assert "1024" in error["message"]  # the KV pool: 64 blocks of 16
    assert route == CHAT or str(count) in error["message"]


def test_a_prompt_that_is_far_too_long_is_not_tokenized_whole(shared: Running) -> None:
    response = post(shared, TEXT, {"prompt": "day " * 200_000})
    assert response.status_code == 400
    assert "more than" in error_of(response)["message"]


def test_the_longest_prompt_that_fits(shared: Running) -> None:
    assert post(shared, TEXT, {"prompt": [5] * 511}).status_code == 200
    assert post(shared, TEXT, {"prompt": [5] * 512}).status_code == 400
    assert post(shared, TEXT, {"prompt": [5] * 512, "max_tokens": 0, "echo": True}).status_code == 200


def test_an_unknown_model_is_404(shared: Running) -> None:
    for route, body in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        response = post(shared, route, {**body, "model": "gpt-9"})
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found"
    assert error_of(shared.client.get("/v1/models/gpt-9"))["param"] == "model"


def test_unknown_routes_and_methods(shared: Running) -> None:
    response = shared.client.get("/v1/nothing")
    assert response.status_code == 404
    assert "/v1/nothing" in error_of(response)["message"]
    response = shared.client.get(CHAT)
    assert response.status_code == 405
    assert "POST" in response.headers["allow"]
    assert error_of(response)["type"] == "invalid_request_error"
    assert shared.client.delete("/v1/models").status_code == 405


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_a_body_that_is_not_said_to_be_json(shared: Running, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = shared.client.post(TEXT, content=b'{"prompt": "hi"}', headers=headers)
    assert response.status_code == 415
    assert "application/json" in error_of(response)["message"]


def test_what_is_unknown_or_null_is_ignored(shared: Running) -> None:
    nulls = dict.fromkeys(
        ["n", "stop", "max_tokens", "temperature", "top_p", "seed", "logit_bias", "stream", "stream_options", "user"]
    )
    extra = {**nulls, "store": False, "metadata": {"a": 1}, "no_such_field": [1, {"x": None}], "service_tier": "auto"}
    chat = {"messages": [{**USER[0], "name": None, "x": 1}], "parallel_tool_calls": True, "reasoning_effort": "low"}
    assert post(shared, CHAT, {**chat, **extra, "response_format": {"type": "text"}}).status_code == 200
    assert post(shared, TEXT, {"prompt": "x", "best_of": 1, "suffix": "", **extra}).status_code == 200


@pytest.mark.parametrize(
    ("route", "param", "body"),
    [
        ("/tokenize", "prompt", {}),
        ("/tokenize", "prompt", {"prompt": "x", "messages": USER}),
        ("/tokenize", "prompt", {"prompt": 3}),
        ("/tokenize", "messages", {"messages": []}),
        ("/detokenize", "tokens", {}),
        ("/detokenize", "tokens", {"tokens": [512]}),
        ("/detokenize", "tokens", {"tokens": [-1]}),
        ("/detokenize", "tokens[0]", {"tokens": ["x"]}),
    ],
)
def test_bad_fields_of_the_token_routes(shared: Running, route: str, param: str, body: dict[str, Any]) -> None:
    response = post(shared, route, body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
