"""Several choices of one request, and what may be told of a text that a stop string may still end."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from headstart.config import SchedulerConfig
from headstart.core.step import RequestOutput
from headstart.engine import QueueFullError
from headstart.server.choice import Delta
from headstart.server.formats import Whole
from headstart.server.timing import Stamps
from tests.server.conftest import SENTENCE, Start
from tests.server.harness import ENGINE_LEDGER, Running, error_of, events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def metric(running: Running, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", running.client.get("/metrics").text, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_refuses_all_choices_before_the_first(start: Start, stream: bool) -> None:
    """The engine keeps room for all of them first: none is refused in the middle of the others' stream."""
    running, engine = start()

    def full(count: int) -> Any:
        raise QueueFullError(count, 1)

    engine.reserve = full  # type: ignore[method-assign]
    response = running.client.post(CHAT, json={"messages": MESSAGES, "n": 4, "stream": stream})
    assert response.status_code == 429
    assert "4 requests" in error_of(response)["message"]
    assert not engine.requests
    assert metric(running, 'headstart_requests_finished_total{finish_reason="refused"}') == 4
    assert running.client.post(CHAT, json={"messages": MESSAGES}).status_code == 200, "one alone needs no reservation"


def test_more_choices_than_can_ever_be_served(start: Start) -> None:
    running, engine = start(scheduler=SchedulerConfig(max_num_seqs=1, max_num_waiting=2))
    for body, field in (({"prompt": "a", "n": 4}, "n"), ({"prompt": ["a"] * 4}, "prompt")):
        response = running.client.post(TEXT, json=body)
        assert response.status_code == 400
        assert error_of(response)["param"] == field
        assert "at most 3" in error_of(response)["message"]
    assert not engine.requests
    assert running.client.post(TEXT, json={"prompt": "a", "n": 3}).status_code == 200


def test_the_others_are_submitted_when_they_are(start: Start) -> None:
    """Not when the first was: what they wait for it is no waiting in the engine's queue."""
    running, engine = start()
    engine.gate = running.call(asyncio.Event)
    running.loop.call_soon_threadsafe(running.loop.call_later, 0.2, engine.gate.set)
    prompt = [5] * 20  # longer than a block: there is something to find in the cache
    assert running.client.post(TEXT, json={"prompt": prompt, "n": 3}).status_code == 200
    first, *others = engine.requests
    assert all(other.submit_time - first.submit_time > 0.15 for other in others)


def test_waiting_for_another_choice_is_queue_in_the_ledger() -> None:
    source = RequestOutput("a", ledger=ENGINE_LEDGER)
    stamps = Stamps(received=10.0, parsed=10.5, submitted=11.0)
    plain, waited = dict(stamps.ledger(source, 15.0)), dict(stamps.ledger(source, 15.0, 3.0))
    assert waited["queue"] == plain["queue"] + 3.0
    assert waited["deliver"] == plain["deliver"] - 3.0
    assert sum(waited.values()) == pytest.approx(5.0)


def test_a_stop_string_is_no_client_that_left(start: Start) -> None:
    running, engine = start()
    response = running.client.post(CHAT, json={"messages": MESSAGES, "stop": " said"})
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert engine.aborted, "the engine need not go on"
    assert metric(running, "headstart_aborts_total") == 0
    engine.gate = running.call(asyncio.Event)
    with running.connect() as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b'content-length: 14\r\n\r\n{"prompt":"x"}'
        )
        engine.wait_until(lambda: bool(engine.running))
    engine.wait_until(lambda: not engine.running)
    running.call(engine.gate.set)
    assert running.client.post(CHAT, json={"messages": MESSAGES}).status_code == 200
    assert metric(running, "headstart_aborts_total") == 1
    assert metric(running, 'headstart_requests_finished_total{finish_reason="abort"}') == 1


@pytest.mark.parametrize("batch", [1, 3])
def test_logprobs_tell_nothing_that_the_text_does_not(start: Start, batch: int) -> None:
    """Whatever the stop string: at no time do the tokens say more than the text that has left."""
    running, _ = start(batch=batch)
    for length in (2, 6):
        for at in range(0, len(SENTENCE) - length, 3):
            for stop in (SENTENCE[at : at + length], SENTENCE[at : at + length] + "?"):
                check_stream(running, stop)


def check_stream(running: Running, stop: str) -> None:
    body = {"messages": MESSAGES, "stream": True, "logprobs": True, "stop": stop}
    text, told = b"", b""
    for event in events(running.client.post(CHAT, json=body).text):
        if event == "[DONE]":
            break
        (choice,) = event["choices"]
        text += choice["delta"].get("content", "").encode()
        told += b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
        assert text.startswith(told), (stop, text, told)
    expected = SENTENCE.split(stop)[0].encode()
    assert text == expected
    longest = max(len(part.encode()) for part in SENTENCE.split(" ")) + 1
    assert len(told) > len(text) - longest, "no more than the token that the stop string cut is missing"


def test_entries_are_not_copied_for_each_delta() -> None:
    whole = Whole(0)
    entries = whole.entries
    for _ in range(3):
        whole.add(Delta(0, False, "a", (object(),), None, None, RequestOutput("")))  # type: ignore[arg-type]
    assert whole.entries is entries
    assert (whole.text, len(entries)) == ("aaa", 3)
