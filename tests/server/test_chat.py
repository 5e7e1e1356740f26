"""The two generating routes over a scripted engine: shapes, stops, log-probabilities, choices, the ledger, streams."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headstart.config import ServerConfig
from headstart.core.request import EngineRequest, FinishReason
from headstart.core.step import RequestOutput
from headstart.metrics.ledger import PARTS
from tests.server.conftest import SENTENCE, Start, TextSide
from tests.server.harness import MODEL, Running, error_of, events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(running: Running, **fields: Any) -> Any:
    response = running.client.post(CHAT, json={"messages": MESSAGES, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def complete(running: Running, **fields: Any) -> Any:
    response = running.client.post(TEXT, json={"prompt": "hi", "max_tokens": 100, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(running: Running, route: str, **fields: Any) -> list[Any]:
    body = {"stream": True, **({"messages": MESSAGES} if route == CHAT else {"prompt": "hi", "max_tokens": 100})}
    response = running.client.post(route, json={**body, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response.text)
    assert found.pop() == "[DONE]"
    return found


def texts(found: list[Any], index: int = 0) -> list[str]:
    """The texts of one choice's chunks, of either kind of stream."""
    choices = [choice for event in found for choice in event["choices"] if choice["index"] == index]
    return [choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices]


def timing(header: str) -> dict[str, float]:
    parts = {}
    for entry in header.split(","):
        name, duration = entry.strip().split(";dur=")
        parts[name] = float(duration)
    return parts


def test_an_answer_has_openais_shape(shared: Running) -> None:
    answer = chat(shared)
    ChatCompletion.model_validate(answer, strict=True)
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": SENTENCE, "refusal": None}
    assert choice["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    answer = complete(shared)
    Completion.model_validate(answer, strict=True)
    assert answer["choices"][0]["text"] == SENTENCE
    assert answer["id"].startswith("cmpl-")


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_a_stream_joined_is_the_whole_answer(shared: Running, route: str) -> None:
    found = stream(shared, route)
    assert "".join(texts(found)) == SENTENCE
    assert [event["choices"][0]["finish_reason"] for event in found] == [None] * (len(found) - 1) + ["stop"]
    assert all("usage" not in event for event in found)
    if route == CHAT:
        for event in found:
            ChatCompletionChunk.model_validate(event, strict=True)
    else:
        Completion.model_validate(found[-1], strict=True)  # before it, the finish reason is null, which the type lacks


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_the_first_event_has_text_and_characters_are_whole(shared: Running, route: str) -> None:
    found = stream(shared, route)
    if route == CHAT:
        assert [event["choices"][0]["delta"].get("role") for event in found] == ["assistant"] + [None] * (
            len(found) - 1
        )
    assert all(texts(found)[:-1])
    assert "\N{FACE WITH TEARS OF JOY}" in texts(found)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(texts(found))


@pytest.mark.parametrize("batch", [1, 3, 7, 100])
@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        ("said", " One day, 小猫 "),
        (["zzz", "day, 小猫 said"], " One "),
        (["\N{FACE WITH TEARS OF JOY}!"], " One day, 小猫 said: "),
        ("猫", " One day, 小"),
        (" One", ""),
        ("never", SENTENCE),
        (["The endless", "endx"], SENTENCE),
    ],
)
def test_stop_strings_never_leak(start: Start, batch: int, stop: Any, kept: str) -> None:
    running, engine = start(batch=batch)
    reason = "stop"
    for route in (CHAT, TEXT):
        found = stream(running, route, stop=stop)
        assert "".join(texts(found)) == kept
        assert found[-1]["choices"][0]["finish_reason"] == reason
    answer = chat(running, stop=stop)
    assert answer["choices"][0]["message"]["content"] == kept
    known = [None] if kept == SENTENCE else [stop] if isinstance(stop, str) else stop
    assert answer["choices"][0]["stop_reason"] in known
    assert not engine.running
    assert len(engine.aborted) == (3 if kept != SENTENCE else 0)


def test_a_stop_string_can_be_kept(shared: Running) -> None:
    assert complete(shared, stop="day", include_stop_str_in_output=True)["choices"][0]["text"] == " One day"


def test_stop_token_ids_and_ignore_eos(shared: Running, text_side: TextSide) -> None:
    third = text_side.sentence[2]
    choice = complete(shared, stop_token_ids=[third])["choices"][0]
    assert choice["text"] == " One day"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", third)
    assert complete(shared)["choices"][0]["stop_reason"] is None
    choice = complete(shared, ignore_eos=True, max_tokens=200)["choices"][0]
    assert choice["text"] == SENTENCE * 2
    assert choice["finish_reason"] == "length"


def test_max_tokens(shared: Running) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        answer = chat(shared, **{field: 2})
        assert answer["choices"][0]["message"]["content"] == " One day"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 2
    assert complete(shared, max_tokens=None)["usage"]["completion_tokens"] == 16
    assert complete(shared, max_tokens=10_000)["choices"][0]["finish_reason"] == "stop"


def test_what_reaches_the_engine(start: Start) -> None:
    running, engine = start()
    fields = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 5}
    more = {"presence_penalty": 1.5, "frequency_penalty": -1, "logit_bias": {"7": -100}, "stop_token_ids": [9]}
    complete(running, **fields, **more, priority=-3, cache_salt="mine", user="someone", prompt=[5, 6], n=2)
    first, second = engine.requests
    assert first.prompt_token_ids == (5, 6)
    assert (first.priority, first.cache_salt) == (-3, "mine")
    assert first.arrival_time < first.submit_time
    params = first.params
    for name, value in {**fields, **more}.items():
        if name not in ("logit_bias", "stop_token_ids"):
            assert getattr(params, name) == value
    assert params.logit_bias == ((7, -100.0),)
    assert params.stop_token_ids == (9, 2)
    assert second.params.seed not in (5, 6)
    assert second.submit_time > first.submit_time
    engine.requests.clear()
    complete(running, top_p=0, seed=-1)
    assert (engine.requests[0].params.top_k, engine.requests[0].params.top_p) == (1, 1.0)
    assert engine.requests[0].params.seed >= 0


def test_choices_and_batches_are_numbered(shared: Running) -> None:
    answer = complete(shared, prompt=["a", "b b"], n=3, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert {choice["text"] for choice in answer["choices"]} == {" One day"}
    single = [complete(shared, prompt=prompt, max_tokens=2)["usage"]["prompt_tokens"] for prompt in ("a", "b b")]
    assert answer["usage"]["prompt_tokens"] == sum(single)
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 6
    found = stream(shared, CHAT, n=3)
    assert ["".join(texts(found, index)) for index in range(3)] == [SENTENCE] * 3
    assert sum(choice["delta"].get("role") == "assistant" for event in found for choice in event["choices"]) == 3


def test_the_first_choice_goes_ahead_and_fills_the_cache(start: Start) -> None:
    running, engine = start()
    order: list[tuple[str, int]] = []
    answer = engine.answer

    def noting(request: EngineRequest) -> Any:
        order.append((request.request_id[-1], len(engine.running)))
        return answer(request)

    engine.answer = noting
    complete(running, prompt=[5] * 40, n=3)
    assert [index for index, _ in order] == ["0", "1", "2"]
    assert order[0][1] == 1
    order.clear()
    complete(running, prompt=[5] * 4, n=3)
    assert len(order) == 3


def test_usage_ends_a_stream_that_asked_for_it(shared: Running) -> None:
    for route in (CHAT, TEXT):
        *found, last = stream(shared, route, stream_options={"include_usage": True})
        assert all(event["usage"] is None for event in found)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] > 5
        assert list(last["usage"]["ttft_ledger"]) == list(PARTS)


@pytest.mark.parametrize("streaming", [False, True])
def test_the_ledger_in_header_and_usage(shared: Running, streaming: bool) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}} if streaming else {}
    response = shared.client.post(CHAT, json={"messages": MESSAGES, **fields})
    parts = timing(response.headers["server-timing"])
    assert list(parts) == list(PARTS)
    assert all(value >= 0 for value in parts.values())
    usage = events(response.text)[-2]["usage"] if streaming else response.json()["usage"]
    assert usage["ttft_ledger"] == pytest.approx(parts, abs=0.0011)
    assert sum(usage["ttft_ledger"].values()) == pytest.approx(usage["ttft_ms"], abs=0.01)
    assert parts["receive"] > 0
    assert parts["tokenize"] > 0


def test_chat_logprobs(shared: Running) -> None:
    content = chat(shared, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == " One"
    assert bytes(content[0]["bytes"]) == b" One"
    assert len(content[0]["top_logprobs"]) == 2
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == SENTENCE
    assert any(entry["token"].startswith("bytes:\\x") for entry in content)
    assert chat(shared, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert chat(shared)["choices"][0]["logprobs"] is None
    found = stream(shared, CHAT, logprobs=True, top_logprobs=2)
    streamed = [entry for event in found for entry in event["choices"][0]["logprobs"]["content"]]
    assert streamed == content


def test_completion_logprobs(shared: Running) -> None:
    choice = complete(shared, logprobs=1)["choices"][0]
    lists = choice["logprobs"]
    assert len({len(values) for values in lists.values()}) == 1
    assert lists["tokens"][:2] == [" One", " day"]
    assert lists["text_offset"][:3] == [0, 4, 8]
    assert all(lists["tokens"][at] in top for at, top in enumerate(lists["top_logprobs"]))
    whole = [at for at, token in enumerate(lists["tokens"]) if not token.startswith("bytes:")]
    for at in whole:
        assert choice["text"][lists["text_offset"][at] :].startswith(lists["tokens"][at])
    found = stream(shared, TEXT, logprobs=1)
    assert [offset for event in found for offset in event["choices"][0]["logprobs"]["text_offset"]] == lists[
        "text_offset"
    ]


def test_logprobs_end_where_a_stop_string_ends_the_text(shared: Running) -> None:
    choice = complete(shared, logprobs=0, stop=" said")["choices"][0]
    assert choice["text"] == " One day, 小猫"
    assert choice["logprobs"]["tokens"][-1].endswith("猫") or choice["logprobs"]["tokens"][-1].startswith("bytes:")
    assert " said" not in choice["logprobs"]["tokens"]


@pytest.mark.parametrize("prompt", ["Once upon a time", [1, 403, 407, 261, 378]])
def test_echo_with_logprobs(shared: Running, prompt: Any) -> None:
    choice = complete(shared, prompt=prompt, echo=True, logprobs=1, max_tokens=2)["choices"][0]
    assert choice["text"] == "Once upon a time One day"
    lists = choice["logprobs"]
    assert lists["tokens"] == ["<s>", " Once", " upon", " a", " time", " One", " day"]
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    assert lists["token_logprobs"][1:] == [pytest.approx(-token / 100) for token in (403, 407, 261, 378, 385, 328)]
    assert lists["text_offset"] == [0, 0, 4, 9, 11, 16, 20]
    found = stream(shared, TEXT, prompt=prompt, echo=True, max_tokens=2)
    assert texts(found)[0].startswith("Once upon a time")


def test_scoring_a_prompt_generates_nothing(start: Start) -> None:
    running, engine = start()
    answer = complete(running, prompt=[5, 6, 7], echo=True, logprobs=1, max_tokens=0)
    assert engine.requests[0].params.max_tokens == 0
    assert engine.requests[0].params.prompt_logprobs == 1
    lists = answer["choices"][0]["logprobs"]
    assert lists["token_logprobs"] == [None, -0.06, -0.07]
    assert answer["usage"]["completion_tokens"] == 0


def test_ids_that_end_inside_a_character_are_echoed_whole(start: Start, text_side: TextSide) -> None:
    running, engine = start()
    cat = text_side.tokenizer.encode("猫", add_special_tokens=False)
    *begin, end = cat
    engine.answer = lambda request: (end, *text_side.sentence[:1], 2)
    choice = complete(running, prompt=[1, *begin], echo=True)["choices"][0]
    assert choice["text"].endswith("猫 One")


def test_no_headers_before_there_is_text(start: Start, text_side: TextSide) -> None:
    """The first tokens are pieces of a character: nothing may be sent, not even headers."""
    running, engine = start()
    emoji = text_side.tokenizer.encode("\N{FACE WITH TEARS OF JOY}", add_special_tokens=False)
    assert len(emoji) > 3
    engine.answer = lambda request: (*emoji[-4:], 2)
    found = stream(running, CHAT)
    assert texts(found)[0] == "\N{FACE WITH TEARS OF JOY}"
    engine.answer = lambda request: (2,)
    (only,) = stream(running, CHAT)
    assert only["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert only["choices"][0]["finish_reason"] == "stop"


def test_request_ids(shared: Running) -> None:
    given = shared.client.get("/v1/models", headers={"x-request-id": "client-7:a/b"})
    assert given.headers["x-request-id"] == "client-7:a/b"
    for odd in ("a b", "x" * 129, 'a"b', "<script>"):
        other = shared.client.get("/v1/models", headers={"x-request-id": odd})
        assert len(other.headers["x-request-id"]) == 32


def test_the_default_length_is_a_setting(start: Start) -> None:
    running, _ = start(server=ServerConfig(default_max_tokens=1))
    assert chat(running)["usage"]["completion_tokens"] == 1


def test_tokens_there_and_back(shared: Running) -> None:
    tokens = shared.client.post("/tokenize", json={"prompt": SENTENCE, "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 512
    back = shared.client.post("/detokenize", json={"tokens": tokens["tokens"], "skip_special_tokens": True})
    assert back.json() == {"prompt": SENTENCE}
    chat_tokens = shared.client.post("/tokenize", json={"messages": MESSAGES}).json()
    usage = chat(shared)["usage"]
    assert chat_tokens["count"] == usage["prompt_tokens"]


def test_text_parts(shared: Running) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    joined = shared.client.post("/tokenize", json={"messages": [{"role": "user", "content": "one\ntwo"}]}).json()
    split = shared.client.post("/tokenize", json={"messages": [{"role": "developer", "content": parts}]}).json()
    system = shared.client.post("/tokenize", json={"messages": [{"role": "system", "content": "one\ntwo"}]}).json()
    assert split["tokens"] == system["tokens"] != joined["tokens"]


def test_raw_bodies_stay_within_json(shared: Running) -> None:
    """Every event is one line of JSON, also when the text has line ends and quotes."""
    response = shared.client.post(CHAT, json={"messages": MESSAGES, "stream": True})
    for line in response.text.splitlines():
        assert not line or line == "data: [DONE]" or json.loads(line.removeprefix("data: "))


def test_errors_of_the_engine_before_the_first_token(start: Start) -> None:
    running, engine = start()
    engine.answer = lambda request: ()
    engine.end = RequestOutput("", finish_reason=FinishReason.ERROR, error="the logits are not finite")
    for streaming in (False, True):
        response = running.client.post(CHAT, json={"messages": MESSAGES, "stream": streaming})
        assert response.status_code == 500
        assert "not finite" in error_of(response)["message"]
