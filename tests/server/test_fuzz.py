"""Any JSON in any field: an answer or a 4xx in OpenAI's shape, never a 500, and never a stream that breaks."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.server.harness import Running, error_of, events

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = (
    st.integers(-3, 30) | st.integers() | st.floats() | st.sampled_from([0, 1, 1 << 63, 1 << 64, -(1 << 63), 511, 512])
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT | st.integers(0, 600).map(str), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.just([{"role": "user", "content": "hi"}]) | st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "robot"])},
        optional={"content": VALUES, "tool_calls": VALUES, "name": VALUES},
    ),
    max_size=3,
)
PROMPTS = TEXT | st.lists(st.integers(-1, 513), max_size=5) | st.lists(TEXT, max_size=3) | VALUES
ROUTES = {
    "/v1/chat/completions": (ChatRequest, {"messages": MESSAGES}),
    "/v1/completions": (CompletionRequest, {"prompt": PROMPTS}),
    "/tokenize": (TokenizeRequest, {"prompt": PROMPTS}),
    "/detokenize": (DetokenizeRequest, {"tokens": PROMPTS}),
}


def bodies(kind: type[msgspec.Struct], usual: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from([field.encode_name for field in msgspec.structs.fields(kind) if field.name != "model"])
    odd = st.dictionaries(names, VALUES, max_size=3)
    return st.builds(lambda base, fields: {**base, **fields}, st.fixed_dictionaries(usual), odd)


@pytest.mark.parametrize("route", ROUTES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_json_in_any_field(shared: Running, route: str, data: st.DataObject) -> None:
    body = data.draw(bodies(*ROUTES[route]))
    response = shared.client.post(route, content=json.dumps(body), headers={"content-type": "application/json"})
    if response.status_code == 200:
        streamed = response.headers["content-type"].startswith("text/event-stream")
        assert events(response.text)[-1] == "[DONE]" if streamed else response.json()
    else:
        assert response.status_code == 400
        assert error_of(response)["message"]
