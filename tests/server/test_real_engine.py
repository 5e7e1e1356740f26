"""The whole path: HTTP, a real engine process and stories260K, used through the official `openai` client."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from headstart.config import SchedulerConfig
from tests.fixtures.stories import STORIES
from tests.server.real import Served, serving_stories

MESSAGES: Any = [{"role": "user", "content": "Tell me a story about a cat"}]


@dataclass(frozen=True)
class Real(Served):
    client: openai.OpenAI


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    with (
        serving_stories(tmp_path_factory.mktemp("served") / "stories", SchedulerConfig(max_num_seqs=8)) as served,
        openai.OpenAI(base_url=f"{served.running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Real(served.running, served.engine, client)


def test_chat(real: Real) -> None:
    answer = real.client.chat.completions.create(model="stories", messages=MESSAGES, max_tokens=20, temperature=0)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20


def test_greedy_text_is_the_golden_one(real: Real) -> None:
    golden = json.loads((STORIES / "golden_greedy.json").read_text(encoding="utf-8"))["text"]
    answer = real.client.completions.create(model="stories", prompt=[1], max_tokens=60, temperature=0)
    text = answer.choices[0].text
    assert len(text) > 100
    assert golden.startswith(text)


def test_a_stream_equals_the_whole_answer(real: Real) -> None:
    fields: Any = {"model": "stories", "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    whole = real.client.chat.completions.create(**fields)
    stream = real.client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert all(chunk.choices[0].delta.content for chunk in chunks[:1])
    joined = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert joined == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 40
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("prompt", ["Once upon a time there was a 小猫 \N{GRINNING FACE}", "猫"])
def test_bytes_of_characters_stay_together(real: Real, prompt: str) -> None:
    """At a high temperature the little model emits byte tokens; whatever they make, the stream is the text."""
    fields: Any = {"model": "stories", "prompt": prompt, "max_tokens": 50, "temperature": 2.0, "seed": 11}
    whole = real.client.completions.create(**fields).choices[0].text
    pieces = [chunk.choices[0].text for chunk in real.client.completions.create(**fields, stream=True)]
    assert "".join(pieces) == whole


def test_logprobs(real: Real) -> None:
    answer = real.client.chat.completions.create(
        model="stories", messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 8
    for entry in logprobs.content:
        assert entry.token == entry.top_logprobs[0].token  # greedy
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert len(entry.top_logprobs) == 3


def test_a_prompt_scored_equals_its_generation(real: Real) -> None:
    """lm-eval's way: echo with no new tokens gives each prompt token's log-probability."""
    fields: Any = {"model": "stories", "temperature": 0, "logprobs": 1}
    made = real.client.completions.create(**fields, prompt=[1], max_tokens=20)
    tokens = real.running.client.post("/tokenize", json={"prompt": made.choices[0].text.strip()}).json()["tokens"]
    scored = real.client.completions.create(**fields, prompt=tokens, max_tokens=0, echo=True)
    given, found = made.choices[0].logprobs, scored.choices[0].logprobs
    assert given is not None
    assert found is not None
    assert found.token_logprobs is not None
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx(given.token_logprobs, abs=1e-3)
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0


def test_three_choices_differ_and_repeat_with_the_seed(real: Real) -> None:
    fields: Any = {"model": "stories", "messages": MESSAGES, "max_tokens": 20, "n": 3, "seed": 7, "temperature": 1.0}
    first = [choice.message.content for choice in real.client.chat.completions.create(**fields).choices]
    again = [choice.message.content for choice in real.client.chat.completions.create(**fields).choices]
    assert first == again
    assert len(set(first)) == 3


def test_stop(real: Real) -> None:
    fields: Any = {"model": "stories", "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
    text = real.client.completions.create(**fields).choices[0].text
    word = text.split()[6]
    answer = real.client.completions.create(**fields, stop=[word])
    assert answer.choices[0].text == text[: text.index(word)]
    assert answer.choices[0].finish_reason == "stop"
    streamed = real.client.completions.create(**fields, stop=word, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text[: text.index(word)]
    assert real.stats().num_running == 0


def test_errors_have_the_clients_types(real: Real) -> None:
    with pytest.raises(openai.NotFoundError):
        real.client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        real.client.completions.create(model="stories", prompt=[5] * 600, stream=True)
    assert caught.value.code == "context_length_exceeded"
    assert "600" in caught.value.message
    assert "512" in caught.value.message
    assert [model.id for model in real.client.models.list()] == ["stories"]


def test_the_ledger_accounts_for_the_clients_time(real: Real) -> None:
    prompt = [5 + at % 400 for at in range(450)]
    with httpx.Client(base_url=real.running.url, timeout=30, trust_env=False) as client:
        client.get("/health")  # connected
        began = time.monotonic()
        with client.stream("POST", "/v1/completions", json={"prompt": prompt, "stream": True}) as response:
            seen = time.monotonic() - began
            header = response.headers["server-timing"]
            response.read()
    parts = {part: float(value) / 1000 for part, value in (entry.strip().split(";dur=") for entry in header.split(","))}
    assert parts["prefill"] > 0
    assert all(value >= 0 for value in parts.values())
    assert sum(parts.values()) <= seen


def test_metrics_of_real_work(real: Real) -> None:
    text = real.running.client.get("/metrics").text
    assert "headstart_engine_up 1" in text
    assert 'headstart_tokens_total{kind="generated"} 0\n' not in text
    assert 'headstart_ttft_part_seconds_count{part="prefill"} 0\n' not in text
    assert 'headstart_requests_finished_total{finish_reason="length"}' in text


def test_choices_one_at_a_time_with_no_room_to_spare(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All places are taken from the beginning: while the first choice runs, nobody else gets those of the others."""
    folder = tmp_path_factory.mktemp("narrow") / "stories"
    narrow = SchedulerConfig(max_num_seqs=1, max_num_waiting=1)
    body = {"prompt": "Once upon a time, " * 4, "n": 2, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with (
        serving_stories(folder, narrow, kv_cache_memory=4 << 20) as served,
        httpx.Client(base_url=served.running.url, trust_env=False) as other,
    ):
        running = served.running
        other.get("/health")  # connected: what follows takes no time beside 200 tokens, twice
        with running.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            refused = other.post("/v1/completions", json={"prompt": "a"})
            rest = "\n".join(lines)
        assert refused.status_code == 429
        assert "event: error" not in rest
        assert rest.count('"finish_reason":"length"') == 2
        assert running.client.post("/v1/completions", json={**body, "n": 3}).status_code == 400
        metrics = running.client.get("/metrics").text
        assert "headstart_aborts_total 0" in metrics
        assert 'headstart_requests_finished_total{finish_reason="refused"} 1' in metrics


def test_a_killed_engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """By itself, last: streams end with an error event, everything after gets 503, and nothing hangs."""
    folder = tmp_path_factory.mktemp("killed") / "stories"
    with serving_stories(folder, SchedulerConfig(), kv_cache_memory=4 << 20) as served:
        running = served.running
        body = {"prompt": "Once", "max_tokens": 500, "stream": True, "ignore_eos": True}
        with running.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(served.engine.pid, signal.SIGKILL)
            rest = "\n".join(lines)
        assert "event: error" in rest
        assert "engine_dead" in rest
        assert "[DONE]" not in rest
        assert running.client.post("/v1/completions", json=body).status_code == 503
        assert running.client.get("/health").status_code == 503
        assert "headstart_engine_up 0" in running.client.get("/metrics").text
