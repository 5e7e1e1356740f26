"""What a request leaves out comes from the model's generation_config.json; what it names, from the request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest

from headstart.config import Config, ModelConfig
from headstart.hub.generation_config import SamplingDefaults
from headstart.server import create_app
from tests.server.conftest import TextSide, sentence_engine
from tests.server.harness import MODEL, Running, ScriptedEngine, serving

DEFAULTS = SamplingDefaults(temperature=0.25, top_p=0.5, top_k=7, min_p=0.125, repetition_penalty=1.5)
OTHERS = {"temperature": 1.0, "top_p": 0.75, "top_k": 3, "min_p": 0.0, "repetition_penalty": 1.0}
BODIES = {
    "/v1/completions": {"prompt": "Once upon a time"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


@dataclass
class Served:
    running: Running
    engine: ScriptedEngine

    def sampling_of(self, route: str, **asked: Any) -> dict[str, float]:
        """How the engine was told to sample a request."""
        answer = self.running.client.post(route, json={"model": MODEL, "max_tokens": 1, **BODIES[route], **asked})
        assert answer.status_code == 200, answer.text
        params = self.engine.requests[-1].params
        return {item.name: getattr(params, item.name) for item in fields(SamplingDefaults)}


@pytest.fixture(scope="module")
def served(text_side: TextSide) -> Iterator[Served]:
    engine, config = sentence_engine(text_side), Config(model=ModelConfig(model=MODEL))
    with serving(lambda: create_app(engine, text_side.tokenizer, text_side.template, config, DEFAULTS)) as running:  # type: ignore[arg-type]
        yield Served(running, engine)


@pytest.mark.parametrize("route", BODIES)
def test_what_is_left_out_comes_from_the_model(served: Served, route: str) -> None:
    expected = {item.name: getattr(DEFAULTS, item.name) for item in fields(DEFAULTS)}
    assert served.sampling_of(route) == expected
    assert served.sampling_of(route, **dict.fromkeys(expected)) == expected  # null is absent


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(("name", "value"), OTHERS.items())
def test_what_is_asked_for_wins_field_by_field(served: Served, route: str, name: str, value: float) -> None:
    found = served.sampling_of(route, **{name: value})
    assert found[name] == value
    assert all(found[other] == getattr(DEFAULTS, other) for other in OTHERS if other != name)


def test_top_k_can_be_switched_off(served: Served) -> None:
    assert served.sampling_of("/v1/completions", top_k=-1)["top_k"] == 0
