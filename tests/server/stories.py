"""A server whose turns end with control tokens, on the smallest real model, and how tests speak to it."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from headstart.config import CacheConfig, Config, ModelConfig, ServerConfig
from headstart.engine import AsyncEngine
from headstart.hub import files_of_folder
from headstart.launch import launch_engine
from headstart.perf.model_spec import read_model_spec
from headstart.server import create_app
from headstart.server.app import Observed
from headstart.text import ChatTemplate, Tokenizer
from tests.fixtures.stories import make_stories_folder
from tests.server.harness import MODEL, Running, serving

Messages = list[dict[str, str]]
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}<s>assistant:"


def template_of(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate({"default": TEMPLATE}, {}, control_tokens=tokenizer.control_tokens)


def byte_by_byte(text: str) -> tuple[int, ...]:
    """A spelling that the tokenizer would not choose: a token for each byte, behind <unk>, <s>, </s>."""
    return tuple(3 + byte for byte in text.encode())


def posted(running: Running, route: str, fields: dict[str, Any]) -> dict[str, Any]:
    answer = running.client.post(route, json={"model": MODEL, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def metric(client: httpx.Client, name: str) -> dict[str, float]:
    """Samples by the value of their only label, "" without one."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {next(iter(sample.labels.values()), ""): sample.value for sample in samples}


@dataclass(frozen=True)
class Real:
    running: Running
    tokenizer: Tokenizer

    def chat(self, messages: Messages, **fields: Any) -> tuple[str, dict[str, Any]]:
        """The answer, of bytes only, and the usage."""
        bias = dict.fromkeys(map(str, byte_by_byte(" aehmst")), 100)
        fields = {"messages": messages, "max_tokens": 60, "logit_bias": bias, "temperature": 1.0, "seed": 5, **fields}
        body = posted(self.running, "/v1/chat/completions", fields)
        return body["choices"][0]["message"]["content"], body["usage"]

    def full(self, messages: Messages) -> list[int]:
        return self.tokenizer.encode(template_of(self.tokenizer).render(messages), add_special_tokens=False)


def serve_stories(stack: ExitStack, folder: Path, cache: CacheConfig, server: ServerConfig | None = None) -> Real:
    """A real engine behind it."""
    model = ModelConfig(model=str(make_stories_folder(folder)), served_model_name=MODEL, threads=1, quantization="none")
    config = Config(model=model, cache=cache, server=server or ServerConfig())
    files = files_of_folder(folder)
    tokenizer = Tokenizer.load(files)
    engines: list[AsyncEngine] = []

    def make_app() -> Observed:
        engines.append(launch_engine(config, files, read_model_spec(files)))
        return create_app(engines[0], tokenizer, template_of(tokenizer), config)

    async def end() -> None:
        await engines[0].shutdown()

    running = stack.enter_context(serving(make_app, end=end))
    asyncio.run_coroutine_threadsafe(engines[0].wait_ready(), running.loop).result(60)
    return Real(running, tokenizer)
