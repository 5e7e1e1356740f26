"""Where prompts part and why: a case for each kind, and the properties that hold for all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.prompt import Kind, PromptError, diverge, read_request
from headstart.prompt.divergence import common_prefix_length, parting

RULES = "Answer in one paragraph. Never guess: say what you do not know. Quote your sources."


def chat(*texts: str, system: str = RULES, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return {"messages": messages, **fields}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"Does {name}", **more}}


def system_with(value: str) -> dict[str, Any]:
    return chat("Why is the sky blue?", system=f"You are kind. It is {value} now. {RULES}")


def one(role: str, text: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text}]}


A, B = tool("search"), tool("open")
ID = "d9e3f5c-6a53-4d0b-8a52-0c9b1f2d3e4f"
LONG = "The paragraph that everybody reads before the question is answered."
CASES: list[tuple[Kind, dict[str, Any], dict[str, Any]]] = [
    (Kind.SALT, chat("Hi", cache_salt="a"), chat("Hi", cache_salt="b")),
    (Kind.TEMPLATE, chat("Hi", chat_template_kwargs={"x": 1}), chat("Hi", chat_template_kwargs={"x": 2})),
    (Kind.TOOLS_REORDERED, chat("Hi", tools=[A, B]), chat("Hi", tools=[B, A])),
    (Kind.TOOLS_CHANGED, chat("Hi", tools=[A]), chat("Hi", tools=[A, B])),
    (Kind.TOOLS_CHANGED, chat("Hi", tools=[A, B]), chat("Hi", tools=[B])),
    (Kind.TOOLS_CHANGED, chat("Hi", tools=[A]), chat("Hi")),
    (Kind.KEYS_REORDERED, chat("Hi", tools=[A]), chat("Hi", tools=[dict(reversed(A.items()))])),
    (Kind.TIMESTAMP, chat("Hi", tools=[tool("a", at="2026-01-02")]), chat("Hi", tools=[tool("a", at="2026-01-03")])),
    (Kind.KEYS_REORDERED, chat('State: {"a": 1, "b": 2} go'), chat('State: {"b": 2, "a": 1} go')),
    (Kind.HISTORY_TRUNCATED, chat("1st", "one", "2nd", "two"), chat("2nd", "two", "3rd", "three", "4th")),
    (Kind.MESSAGE_INSERTED, chat("Hello", "Hi"), chat("Context", "Hello", "Hello", "Hi")),
    (Kind.ROLE_CHANGED, one("user", "x"), one("tool", "x")),
    (Kind.WHITESPACE, chat("one two  three four five six"), chat("one two three four five six")),
    (Kind.WHITESPACE, chat("Hello there\n", "Hi"), chat("Hello there", "Hi")),
    (Kind.UNICODE, chat("caf\u00e9 at noon"), chat("cafe\u0301 at noon")),
    (Kind.DOCUMENTS_REORDERED, chat(f"{LONG}\n\nThe second one."), chat(f"The second one.\n\n{LONG}")),
    (Kind.UUID, system_with(f"0{ID}"), system_with(f"1{ID}")),
    (Kind.TIMESTAMP, system_with("2026-03-01T12:00:01Z"), system_with("2026-03-01T12:00:07Z")),
    (Kind.TIMESTAMP, system_with("Monday, March 2, 2026"), system_with("Monday, March 3, 2026")),
    (Kind.TIMESTAMP, system_with("Monday"), system_with("Tuesday")),
    (Kind.TIMESTAMP, system_with("1767225600"), system_with("1767225977")),
    (Kind.TIMESTAMP, system_with("3:05 pm"), system_with("3:06 pm")),
    (Kind.HEX_ID, system_with("deadbeef01"), system_with("deadbeef02")),
    (Kind.VERSION, system_with("v1.2.3"), system_with("v1.3.0")),
    (Kind.COUNTER, system_with("#17"), system_with("#18")),
    (Kind.NONCE, system_with("q7Xz-2pLw9"), system_with("q7Zz-4pLw1")),
    (Kind.VALUE, system_with("Alice Smith"), system_with("Bob")),
    (Kind.VALUE, system_with("en-US"), system_with("de-CH")),
    (Kind.SYSTEM_CHANGED, chat("Hi", system="Be brief and kind."), chat("Hi", system="Write at length.")),
    (Kind.MESSAGE_EDITED, chat("Old words here", "a", "q"), chat("Quite another thing", "a", "q")),
    (Kind.VARIABLE_FIRST, chat(f"Cats purr when stroked.\n\n{LONG}"), chat(f"How do planes fly so high?\n\n{LONG}")),
    (Kind.NEW_TEXT, chat("Tell me of rivers"), chat("Why do planes fly?")),
    (Kind.CONTINUED, chat("Hi"), chat("Hi", "Hello", "Who are you?")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "old", "new"), CASES)
def test_each_kind(kind: Kind, old: dict[str, Any], new: dict[str, Any]) -> None:
    assert diverge(read_request(old), read_request(new)).kind is kind


def test_reordered_messages() -> None:
    old, new = chat("alpha", "beta", "gamma", "delta"), chat("alpha", "beta", "gamma", "delta")
    new["messages"][1:] = [new["messages"][i] for i in (3, 4, 1, 2)]
    assert diverge(read_request(old), read_request(new)).kind is Kind.MESSAGES_REORDERED


def test_the_place_is_named() -> None:
    old, new = system_with("2026-03-01T12:00:01Z"), system_with("2026-03-01T12:00:07Z")
    found = diverge(read_request(old), read_request(new))
    text = new["messages"][0]["content"]
    assert text[found.start : found.end] == "2026-03-01T12:00:07Z"
    assert (found.label, found.before[-19:], found.old[:2], found.new[:2]) == (
        "message 0 (system)", "2026-03-01T12:00:07"[:18].rjust(19), "1Z", "7Z",
    )  # fmt: skip
    assert f"message 0 (system), characters {found.start}-{found.end}" in found.advice


@pytest.mark.parametrize(
    ("old", "new"),
    [("9:15", "10:15"), ("2026-03-01", "2026-03-02"), ("Alice Smith", "Bob"), (f"0{ID}", f"1{ID}"), ("v1.2.3", "v1.2")],
)
def test_the_values_are_shown_and_nothing_behind_them(old: str, new: str) -> None:
    found = diverge(read_request(system_with(old)), read_request(system_with(new)))
    assert (found.old_value, found.new_value) == (old, new)
    assert found.lead.endswith("It is ")


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (chat("Hi \ud800"), "message 1"),
        ({"messages": [{"role": "\udc00", "content": "Hi"}]}, "message 0"),
        (chat("Hi", tools=[tool("\ud800")]), "tool 0"),
        (chat("Hi", cache_salt="\ud800"), "beside"),
        (chat("Hi", chat_template_kwargs={"x": "\ud800"}), "beside"),
    ],
)
def test_half_of_a_surrogate_pair_is_named(body: dict[str, Any], where: str) -> None:
    with pytest.raises(PromptError, match=rf"{where}.*half of a surrogate pair"):
        read_request(body)


def test_what_is_the_same_but_not_cached_was_evicted() -> None:
    prompt = read_request(chat("Hi"))
    assert diverge(prompt, prompt, evicted=True).kind is Kind.EVICTED


def test_the_forms_of_a_request() -> None:
    plain = read_request(chat("Hi"))
    assert read_request({"custom_id": "1", "body": chat("Hi")}) == plain
    parts = chat([{"type": "text", "text": "Hi"}])  # type: ignore[arg-type]
    assert read_request(parts) == plain
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": {"name": "f"}}]}
    assert read_request({"messages": [call]}).parts[0].text == json.dumps([{"name": "f"}])


@pytest.mark.parametrize(
    "body", [None, [], {}, {"messages": []}, {"messages": [1]}, {"messages": [{"role": "user", "content": 1}]},
             {"messages": [{"role": "user"}], "tools": 1}],
)  # fmt: skip
def test_what_is_no_request_is_named(body: Any) -> None:
    with pytest.raises(PromptError, match=r"messages|tools|object"):
        read_request(body)


TEXT = st.text(alphabet='ab \n1{}":', max_size=12)
CHATS = st.lists(TEXT, min_size=1, max_size=4).map(lambda texts: read_request(chat(*texts, system="")))


@given(CHATS, CHATS)
def test_any_two_prompts_can_be_compared(old: Any, new: Any) -> None:
    found = diverge(old, new)
    part, offset = parting(old, new)
    assert (found.part, found.offset) == (part, offset)
    assert [p.text for p in old.parts[:part]] == [p.text for p in new.parts[:part]]
    if found.kind is not Kind.CONTINUED:
        assert old.parts[part:] != new.parts[part:]
    assert diverge(new, new).kind is Kind.CONTINUED


@given(TEXT, TEXT)
def test_the_common_prefix(a: str, b: str) -> None:
    count = common_prefix_length(a, b)
    assert a[:count] == b[:count]
    assert count == min(len(a), len(b)) or a[count] != b[count]
