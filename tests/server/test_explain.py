"""Why a prompt missed the prefix cache, over HTTP: a real engine, whose cache really holds or has lost it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from headstart.config import CacheConfig, Config, ConfigError, ServerConfig, validate
from tests.server.harness import MODEL, error_of, events
from tests.server.stories import Messages, Real, metric, serve_stories

EXPLAIN = {"x-headstart-explain": "1"}
RULES = "Tell the story of a little girl and her cat. Be kind, be short, and end well."
BLOCK = 16
Serve = Callable[..., Real]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with ExitStack() as stack:

        def start(memory: int = 4 << 20, prefix_cache: bool = True, **server: Any) -> Real:
            cache = CacheConfig(kv_cache_memory=memory, prefix_cache=prefix_cache)
            return serve_stories(stack, tmp_path, cache, ServerConfig(**server))

        yield start


def chat(system: str, *turns: str) -> Messages:
    roles = ("user", "assistant")
    said = [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
    return [{"role": "system", "content": system}, *said]


def asked(real: Real, messages: Messages, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    """The answer's body."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 3, "temperature": 0, **fields}
    answer = real.running.client.post("/v1/chat/completions", json=body, headers={**EXPLAIN, **(headers or {})})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def explained(real: Real, messages: Messages, **fields: Any) -> dict[str, Any]:
    usage = asked(real, messages, **fields)["usage"]
    (found,) = usage["explain"]
    assert found["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert found["prompt_tokens"] == usage["prompt_tokens"]
    return dict(found)


def test_what_differs_is_named(serve: Serve) -> None:
    real = serve()
    first = explained(real, chat(f"It is 12:01:33. {RULES}", "Go on."))
    assert (first["kind"], first["harmless"], first["nearest_tokens"], first["cached_tokens"]) == ("first", True, 0, 0)
    found = explained(real, chat(f"It is 12:47:05. {RULES}", "Go on."))
    assert (found["kind"], found["where"], found["harmless"]) == ("timestamp", "message 0 (system)", False)
    assert (found["old"], found["new"], found["after"]) == ("12:01:33", "12:47:05", "It is ")
    assert found["characters"] == [6, 14]
    assert "move the timestamp in message 0 (system), characters 6-14" in found["advice"]
    assert metric(real.running.client, "headstart_explained_prompts_total") == {"first": 1, "timestamp": 1}
    assert metric(real.running.client, "headstart_explain_memory_bytes")[""] > 0


def test_a_conversation_that_goes_on_lost_nothing(serve: Serve) -> None:
    real = serve()
    turn = chat(RULES, "Tell me of her cat.")
    answer = asked(real, turn, max_tokens=24)
    content, usage = answer["choices"][0]["message"]["content"], answer["usage"]
    found = explained(
        real, [*turn, {"role": "assistant", "content": content}, {"role": "user", "content": "And then?"}]
    )
    assert (found["kind"], found["harmless"], found["advice"]) == ("continued", True, "")
    assert found["nearest_tokens"] >= usage["total_tokens"] - 1
    assert found["cached_tokens"] >= (usage["total_tokens"] - 1) // BLOCK * BLOCK
    other = explained(real, chat(RULES, "What is the name of her dog?"))
    assert (other["kind"], other["harmless"], other["where"]) == ("new text", True, "message 1 (user)")
    assert other["cached_tokens"] >= BLOCK


def test_an_answer_that_was_changed_is_found_out(serve: Serve) -> None:
    real = serve()
    turn = chat(RULES, "Tell me of her cat.")
    content = asked(real, turn, max_tokens=40)["choices"][0]["message"]["content"]
    words = content.split(" ")
    changed = " ".join([*words[:2], "suddenly", *words[3:]])
    assert changed != content
    found = explained(
        real, [*turn, {"role": "assistant", "content": changed}, {"role": "user", "content": "And then?"}]
    )
    assert found["where"] == "message 2 (assistant)"
    assert found["kind"] == "edited earlier message" or not found["harmless"]
    assert "suddenly" in found["new"]


def test_what_was_evicted_is_no_fault_of_the_prompt(serve: Serve) -> None:
    """The cache holds a few prompts; others push the first one out."""
    real = serve(memory=512 << 10)
    turn = chat(RULES, "Tell me of her cat.")
    assert explained(real, turn)["cached_tokens"] == 0
    again = explained(real, turn)
    assert again["kind"] == "continued"
    assert again["cached_tokens"] >= BLOCK
    for index in range(40):
        asked(real, chat(f"{index} birds sang. " * 12, "Sing."), headers={"x-headstart-explain": "0"})
    found = explained(real, turn)
    assert found["kind"] == "evicted"
    assert found["cached_tokens"] < found["nearest_tokens"]
    assert "--kv-cache-memory" in found["advice"]


def test_a_salt_keeps_texts_apart(serve: Serve) -> None:
    real = serve()
    explained(real, chat(RULES, "Tell me of her cat."), cache_salt="one")
    found = explained(real, chat(RULES, "Tell me of her cat."), cache_salt="two")
    assert found["kind"] == "cache salt"
    assert not {"old", "new", "after", "where"} & found.keys()  # that is what a salt is for
    assert "cache_salt" in found["advice"]
    assert RULES not in json.dumps(found)


def test_nothing_is_told_of_another_key(serve: Serve) -> None:
    real = serve(api_keys=("alice", "bob"))
    alice, bob = ({"authorization": f"Bearer {key}"} for key in ("alice", "bob"))
    asked(real, chat(f"Mine is 4711. {RULES}", "Go on."), headers=alice)
    (found,) = asked(real, chat(f"Mine is 4712. {RULES}", "Go on."), headers=bob)["usage"]["explain"]
    assert found["kind"] == "first"
    (found,) = asked(real, chat(f"Mine is 4713. {RULES}", "Go on."), headers=alice)["usage"]["explain"]
    assert (found["old"], found["new"]) == ("4711", "4713")


def test_a_stream_tells_it_at_its_end(serve: Serve) -> None:
    real = serve()
    body = {"model": MODEL, "messages": chat(RULES, "Go on."), "max_tokens": 3, "stream": True}
    answer = real.running.client.post("/v1/chat/completions", json=body, headers=EXPLAIN)
    last = events(answer.text)[-2]
    assert last["choices"] == []
    assert last["usage"]["explain"][0]["kind"] == "first"
    answer = real.running.client.post("/v1/chat/completions", json=body)
    assert all(chunk.get("usage") is None for chunk in events(answer.text)[:-1])


def test_without_the_header_nothing_is_said(serve: Serve) -> None:
    real = serve()
    assert "explain" not in asked(real, chat(RULES, "Go on."), headers={"x-headstart-explain": "false"})["usage"]


def test_plain_completions_tell_it_for_each_prompt(serve: Serve) -> None:
    real = serve()

    def complete(prompt: object) -> list[dict[str, Any]]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
        answer = real.running.client.post("/v1/completions", json=body, headers=EXPLAIN)
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["usage"]["explain"]
        return found

    text = "Order 1001 of the little girl. " + RULES
    (first,) = complete(text)
    other, same = complete([text.replace("1001", "1002"), text])
    assert (first["kind"], other["kind"], same["kind"]) == ("first", "counter", "continued")
    assert (other["where"], other["old"], other["new"]) == ("message 0 (prompt)", "1001", "1002")
    ids = real.tokenizer.encode(text)
    assert complete([*ids[:20], 9, 9])[0]["kind"] == "new text"
    assert complete(ids)[0]["kind"] == "continued"


def test_an_estimate_tells_it_before(serve: Serve) -> None:
    real = serve()
    asked(real, chat(f"It is 12:01:33. {RULES}", "Go on."))
    body = {"model": MODEL, "messages": chat(f"It is 12:47:05. {RULES}", "Go on.")}
    answer = real.running.client.post("/v1/ttft/estimate", json=body, headers=EXPLAIN).json()
    assert answer["explain"][0]["kind"] == "timestamp"
    assert answer["explain"][0]["cached_tokens"] == answer["cached_tokens"]
    assert "explain" not in real.running.client.post("/v1/ttft/estimate", json=body).json()


def test_a_server_may_tell_it_always(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Streams whose clients did not ask for a usage get none: the log and the metric have it."""
    real = serve(explain=True)
    caplog.set_level(logging.INFO, "headstart.explain")
    asked(real, chat(f"It is 12:01:33. {RULES}", "Go on."), headers={"x-headstart-explain": "0"})
    body = {"model": MODEL, "messages": chat(f"It is 12:47:05. {RULES}", "Go on."), "max_tokens": 3, "stream": True}
    answer = real.running.client.post("/v1/chat/completions", json=body)
    assert all(chunk.get("usage") is None for chunk in events(answer.text)[:-1])
    (said,) = [record.getMessage() for record in caplog.records if record.name == "headstart.explain"]
    assert "timestamp in message 0 (system)" in said
    assert "12:" not in said
    assert metric(real.running.client, "headstart_explained_prompts_total") == {"first": 1, "timestamp": 1}


@pytest.mark.parametrize(
    ("settings", "value", "says"),
    [({}, "yes", "must be 1 or 0"), ({"explain_memory": 0}, "1", "explain_memory is 0")],
)
def test_what_cannot_be_told_is_an_error(serve: Serve, settings: dict[str, Any], value: str, says: str) -> None:
    real = serve(**settings)
    body = {"model": MODEL, "messages": chat(RULES, "Go on."), "max_tokens": 1}
    answer = real.running.client.post("/v1/chat/completions", json=body, headers={"x-headstart-explain": value})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "x-headstart-explain"
    assert says in error_of(answer)["message"]
    assert real.running.client.post("/v1/chat/completions", json=body).status_code == 200


def test_without_a_prefix_cache_there_is_nothing_to_explain(serve: Serve) -> None:
    real = serve(prefix_cache=False)
    body = {"model": MODEL, "messages": chat(RULES, "Go on."), "max_tokens": 1}
    answer: httpx.Response = real.running.client.post("/v1/chat/completions", json=body, headers=EXPLAIN)
    assert answer.status_code == 400
    assert "prefix cache off" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("config", "lacking"),
    [
        (Config(server=ServerConfig(explain=True, explain_memory=0)), "explain_memory"),
        (Config(server=ServerConfig(explain=True), cache=CacheConfig(prefix_cache=False)), "prefix_cache"),
    ],
)
def test_always_needs_something_to_compare_with(config: Config, lacking: str) -> None:
    with pytest.raises(ConfigError, match=lacking):
        validate(config)
