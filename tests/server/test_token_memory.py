"""Texts are tokenized once, over HTTP: what the engine gets, what /metrics says, what the prefix cache finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.config import CacheConfig, Config, ModelConfig, ServerConfig
from headstart.core.request import EngineRequest
from headstart.server import create_app
from headstart.text import ChatTemplate, Tokenizer
from tests.server.conftest import TextSide
from tests.server.harness import MODEL, Running, ScriptedEngine, events, serving
from tests.server.stories import Messages, byte_by_byte, metric, posted, serve_stories, template_of

ANSWER = " One little cat"
BLOCK = 16  # tokens


@dataclass(frozen=True)
class Talk:
    """A server whose turns end with control tokens."""

    running: Running
    engine: ScriptedEngine
    tokenizer: Tokenizer
    template: ChatTemplate

    def chat(self, messages: Messages, **fields: Any) -> dict[str, Any]:
        return posted(self.running, "/v1/chat/completions", {"messages": messages, **fields})

    def full(self, messages: Messages) -> tuple[int, ...]:
        """What tokenizing all of it gives."""
        return tuple(self.tokenizer.encode(self.template.render(messages), add_special_tokens=False))

    def received(self) -> tuple[int, ...]:
        """By the engine, as the last prompt."""
        return tuple(self.engine.requests[-1].prompt_token_ids)

    def count(self, text: str) -> int:
        """Tokens."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))


Begin = Callable[..., Talk]
Answer = Callable[[EngineRequest], Sequence[int]]


@pytest.fixture
def begin(text_side: TextSide) -> Iterator[Begin]:
    """Start a server: `begin(token_memory=..., answer=...)`. It says ANSWER byte by byte, then ends."""
    with ExitStack() as stack:

        def start(token_memory: int = 1 << 20, answer: Answer | None = None, batch: int = 1) -> Talk:
            end = text_side.tokenizer.eos_token_ids[0]
            engine = ScriptedEngine(answer or (lambda request: (*byte_by_byte(ANSWER), end)), batch=batch)
            template = template_of(text_side.tokenizer)
            config = Config(model=ModelConfig(model=MODEL), server=ServerConfig(token_memory=token_memory))
            make = lambda: create_app(engine, text_side.tokenizer, template, config)  # type: ignore[arg-type]  # noqa: E731
            return Talk(stack.enter_context(serving(make)), engine, text_side.tokenizer, template)

        yield start


@dataclass
class Sources:
    """What `headstart_prompt_text_tokens_total` grew by since the last look: (tokenizer, memory, sampled)."""

    client: httpx.Client
    seen: tuple[float, ...] = (0, 0, 0)

    def since(self) -> tuple[float, ...]:
        found = metric(self.client, "headstart_prompt_text_tokens_total")
        now = tuple(found.get(source, 0) for source in ("tokenizer", "memory", "sampled"))
        grown = tuple(new - old for new, old in zip(now, self.seen, strict=True))
        self.seen = now
        return grown


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Once upon a time there was a little girl. " * 5}
FIRST = [SYSTEM, user("Tell me a story about a cat")]
NEXT = user("And then?")


def test_a_next_turn_is_tokenized_from_its_tail_only(begin: Begin) -> None:
    talk = begin()
    sources = Sources(talk.running.client)
    talk.chat(FIRST)
    assert talk.received() == talk.full(FIRST)
    assert sources.since() == (len(talk.full(FIRST)), 0, 0)
    turn = [*FIRST, assistant("Not what was said"), NEXT]
    talk.chat(turn)
    full = talk.full(turn)
    assert talk.received() == full
    tail = talk.count("<s>assistant:Not what was said") + talk.count("<s>user:And then?")
    assert sources.since() == (tail, len(full) - tail, 0)
    assert tail < len(full) / 4
    talk.chat(turn)
    assert talk.received() == full
    assert sources.since() == (0, len(full), 0)


def test_a_change_in_the_middle(begin: Begin) -> None:
    talk = begin()
    sources = Sources(talk.running.client)
    talk.chat([SYSTEM, user("a cat"), assistant("Yes"), NEXT])
    sources.since()
    changed = [SYSTEM, user("a dog"), assistant("Yes"), NEXT]
    talk.chat(changed)
    full, new = talk.full(changed), talk.count("<s>user:a dog")
    assert talk.received() == full
    assert sources.since() == (new, len(full) - new, 0)


def test_a_completion_that_goes_on(begin: Begin) -> None:
    """BOS is put before it, which nobody remembers."""
    talk = begin()
    sources = Sources(talk.running.client)
    start, end = "One day a cat and a dog went to the park.</s>", "<s>They ran"
    posted(talk.running, "/v1/completions", {"prompt": start})
    sources.since()
    posted(talk.running, "/v1/completions", {"prompt": start + end})
    full = tuple(talk.tokenizer.encode(start + end))
    assert talk.received() == full
    assert sources.since() == (1 + talk.count(end), talk.count(start), 0)


SHREDS = st.sampled_from(("<s>", "</s>", "<unk>", " ", "  ", "cat", " cat", "s>", "</", "\n", "▁", "é", "小", "🙂"))
TEXTS = st.lists(SHREDS | st.text(st.characters(exclude_categories=("Cs",)), max_size=3), max_size=8).map("".join)


def test_the_engine_gets_what_full_tokenization_gives(begin: Begin) -> None:
    talk = begin(token_memory=20_000)  # some is forgotten on the way

    @settings(max_examples=40, deadline=None)
    @given(TEXTS, TEXTS, TEXTS)
    def check(first: str, second: str, third: str) -> None:
        messages = [user(first), assistant("x" + second), user(third)]
        for turn in (messages[:1], messages, messages[:1]):
            talk.chat(turn)
            assert talk.received() == talk.full(turn)

    check()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_comes_back_with_its_own_ids(begin: Begin, stream: bool, batch: int) -> None:
    talk = begin(batch=batch)
    sources = Sources(talk.running.client)
    body = {"model": MODEL, "messages": FIRST, "stream": stream}
    response = talk.running.client.post("/v1/chat/completions", json=body)
    content = text_of_stream(response) if stream else response.json()["choices"][0]["message"]["content"]
    assert content == ANSWER
    first = talk.received()
    sources.since()
    turn = [*FIRST, assistant(content), NEXT]
    talk.chat(turn)
    ids = byte_by_byte(ANSWER)
    assert talk.received()[: len(first) + len(ids)] == (*first, *ids)
    assert talk.received() != talk.full(turn)
    assert talk.tokenizer.decode(talk.received(), False) == talk.tokenizer.decode(talk.full(turn), False)
    sampled = talk.count("<s>assistant:") + len(ids)
    new = talk.count("<s>user:And then?")
    assert sources.since() == (new, len(talk.received()) - sampled - new, sampled)


def text_of_stream(response: httpx.Response) -> str:
    deltas = [event["choices"][0]["delta"] for event in events(response.text)[:-1]]
    return "".join(delta.get("content", "") for delta in deltas)


def test_an_answer_belongs_to_its_conversation(begin: Begin) -> None:
    talk = begin()
    talk.chat(FIRST)
    for turn in (
        [user("Something else"), assistant(ANSWER), NEXT],
        [*FIRST, assistant(ANSWER + "."), NEXT],
        [*FIRST, assistant(ANSWER.strip()), NEXT],
    ):
        talk.chat(turn)
        assert talk.received() == talk.full(turn)


def test_each_of_several_choices_comes_back(begin: Begin) -> None:
    said = (" a cat", " a dog")
    talk = begin(answer=lambda request: byte_by_byte(said[int(request.request_id[-1])]))
    choices = talk.chat(FIRST, n=2)["choices"]
    assert [choice["message"]["content"] for choice in choices] == list(said)
    first = talk.received()
    for text in said:
        talk.chat([*FIRST, assistant(text), NEXT])
        ids = byte_by_byte(text)
        assert talk.received()[: len(first) + len(ids)] == (*first, *ids)


def test_an_answer_that_a_stop_string_cut(begin: Begin) -> None:
    talk = begin()
    content = talk.chat(FIRST, stop=["tle"])["choices"][0]["message"]["content"]
    assert content == " One lit"
    first, ids = talk.received(), byte_by_byte(content)
    talk.chat([*FIRST, assistant(content), NEXT])
    assert talk.received()[: len(first) + len(ids)] == (*first, *ids)


@pytest.mark.parametrize("salts", [("a", "b"), ("a", None), (None, "a")])
def test_another_salt_reuses_nothing(begin: Begin, salts: tuple[str | None, str | None]) -> None:
    talk = begin()
    sources = Sources(talk.running.client)
    mine, other = ({} if salt is None else {"cache_salt": salt} for salt in salts)
    turn = [*FIRST, assistant(ANSWER), NEXT]
    talk.chat(FIRST, **mine)
    sources.since()
    talk.chat(turn, **other)
    full = talk.full(turn)
    assert talk.received() == full
    assert sources.since() == (len(full), 0, 0)
    talk.chat(turn, **mine)
    assert talk.received() != full
    assert sources.since()[2] > len(ANSWER)


def test_off(begin: Begin) -> None:
    talk = begin(token_memory=0)
    sources = Sources(talk.running.client)
    turn = [*FIRST, assistant(ANSWER), NEXT]
    for messages in (FIRST, turn, turn):
        talk.chat(messages)
        assert talk.received() == talk.full(messages)
        assert sources.since() == (len(talk.full(messages)), 0, 0)
    assert metric(talk.running.client, "headstart_token_memory_bytes") == {"": 0}


def test_the_metrics_add_up(begin: Begin) -> None:
    """Prompts of ids are none of it, and what is only counted neither."""
    talk = begin()
    usage = 0
    turn = [*FIRST, assistant(ANSWER), NEXT]
    for messages in (FIRST, turn, FIRST, turn):
        usage += talk.chat(messages)["usage"]["prompt_tokens"]
    body = {"prompt": ["One day", "One day", "<s>a</s>"]}
    usage += posted(talk.running, "/v1/completions", body)["usage"]["prompt_tokens"]
    of_ids = posted(talk.running, "/v1/completions", {"prompt": [5, 6, 7]})["usage"]["prompt_tokens"]
    posted(talk.running, "/tokenize", {"messages": turn})
    assert sum(Sources(talk.running.client).since()) == usage
    assert metric(talk.running.client, "headstart_request_prompt_tokens_sum") == {"": usage + of_ids}


def test_the_memory_is_bounded(begin: Begin) -> None:
    talk = begin(token_memory=4_000)
    sizes = []
    for index in range(12):
        messages = [user(f"{index} cats. " * 10)]
        talk.chat(messages)
        assert talk.received() == talk.full(messages)
        sizes += metric(talk.running.client, "headstart_token_memory_bytes").values()
    assert sizes[0] > 0
    assert sizes[1] > sizes[0]
    assert max(sizes) <= 4_000


def test_the_prefix_cache_finds_prompt_and_answer(tmp_path: Path) -> None:
    """With the memory, all but the new turn; without, only up to where the tokenizer spells the answer otherwise."""
    cached = []
    for token_memory in (1 << 20, 0):
        with ExitStack() as stack:
            cache, memory = CacheConfig(kv_cache_memory=4 << 20), ServerConfig(token_memory=token_memory)
            real = serve_stories(stack, tmp_path / str(token_memory), cache, memory)
            sources = Sources(real.running.client)
            content, before = real.chat(FIRST)
            turn = [*FIRST, assistant(content), NEXT]
            sources.since()
            _, usage = real.chat(turn)
            sampled = sources.since()[2]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            whole = before["prompt_tokens"] + before["completion_tokens"]
            if token_memory:
                assert sampled > before["completion_tokens"]
                # The last token that was sampled was not computed; blocks are matched whole.
                assert cached[0] >= (whole - 1) // BLOCK * BLOCK > before["prompt_tokens"]
                _, other = real.chat(turn, cache_salt="other")
                assert other["prompt_tokens_details"]["cached_tokens"] == 0
                assert other["prompt_tokens"] == len(real.full(turn)) != usage["prompt_tokens"]
            else:
                assert sampled == 0
                assert usage["prompt_tokens"] == len(real.full(turn))
    assert cached[1] < cached[0]
