"""The text side of stories260K, and servers over a scripted engine that says one fixed sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from headstart.config import SchedulerConfig, ServerConfig
from headstart.hub import files_of_folder
from headstart.server.connection import ConnectionLimits
from headstart.text import ChatTemplate, Tokenizer
from tests.fixtures.stories import make_stories_folder
from tests.server.harness import Running, ScriptedEngine, scripted_app, serving

SENTENCE = " One day, 小猫 said: \N{FACE WITH TEARS OF JOY}! The end"


@dataclass(frozen=True)
class TextSide:
    tokenizer: Tokenizer
    template: ChatTemplate
    sentence: tuple[int, ...]


@pytest.fixture(scope="session")
def text_side(tmp_path_factory: pytest.TempPathFactory) -> TextSide:
    files = files_of_folder(make_stories_folder(tmp_path_factory.mktemp("stories") / "stories"))
    tokenizer = Tokenizer.load(files)
    ids = tuple(tokenizer.encode(SENTENCE.strip(), add_special_tokens=False))
    return TextSide(tokenizer, ChatTemplate.load(files, tokenizer), ids)


def sentence_engine(text_side: TextSide, **fields: Any) -> ScriptedEngine:
    """Says SENTENCE, then the end-of-sequence token (and on, for who ignores it)."""
    eos = text_side.tokenizer.eos_token_ids[0]
    said = (*text_side.sentence, eos, *text_side.sentence)
    return ScriptedEngine(lambda request: said, **fields)


@pytest.fixture(scope="module")
def shared(text_side: TextSide) -> Iterator[Running]:
    """One server for all tests of a module that leave it as it was."""
    engine = sentence_engine(text_side)
    with serving(lambda: scripted_app(engine, text_side.tokenizer, text_side.template)) as running:
        yield running


Start = Callable[..., tuple[Running, ScriptedEngine]]


@pytest.fixture
def start(text_side: TextSide) -> Iterator[Start]:
    """Start a server of one's own: `start(server=ServerConfig(...), state=..., batch=...)`."""
    with ExitStack() as stack:

        def begin(
            server: ServerConfig | None = None,
            grace_seconds: int = 1,
            limits: ConnectionLimits | None = None,
            scheduler: SchedulerConfig | None = None,
            **fields: Any,
        ) -> Any:
            engine = sentence_engine(text_side, **fields)
            app = lambda: scripted_app(engine, text_side.tokenizer, text_side.template, server, scheduler)  # noqa: E731
            return stack.enter_context(serving(app, grace_seconds=grace_seconds, limits=limits)), engine

        yield begin
