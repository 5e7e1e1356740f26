"""Text work beside the event loop: how much of it may wait, how much of a text is looked at, and when it is warm."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headstart.server.errors import ApiError
from headstart.server.texts import NUM_THREADS, TextPool
from headstart.text import ChatTemplate, Tokenizer
from tests.server.conftest import TextSide, sentence_engine
from tests.server.harness import Running, error_of, scripted_app


@pytest.mark.parametrize("num_queued", [0, 2])
async def test_texts_that_wait_count_with_the_requests_that_wait(num_queued: int) -> None:
    pool = TextPool(3, lambda: num_queued)
    go = threading.Event()
    tasks = [asyncio.create_task(pool.run(go.wait)) for _ in range(NUM_THREADS + 3 - num_queued)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="3 requests are waiting and the limit is 3") as caught:
        await pool.run(go.wait)
    assert caught.value.status == 429
    go.set()
    assert all(await asyncio.gather(*tasks))
    assert await pool.run(lambda: 5) == 5


async def test_a_caller_who_leaves_makes_room() -> None:
    pool = TextPool(1, lambda: 0)
    go = threading.Event()
    tasks = [asyncio.create_task(pool.run(go.wait)) for _ in range(NUM_THREADS + 1)]
    await asyncio.sleep(0)
    tasks[-1].cancel()
    await asyncio.gather(tasks[-1], return_exceptions=True)
    last = asyncio.create_task(pool.run(lambda: 7))
    go.set()
    assert await last == 7
    await asyncio.gather(*tasks[:-1])


async def test_what_fails_in_a_thread_fails_here() -> None:
    with pytest.raises(ZeroDivisionError):
        await TextPool(1, lambda: 0).run(lambda: 1 // 0)


def test_text_that_cannot_fit_is_tokenized_in_part(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    encode = Tokenizer.encode

    def spy(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", spy)
    context = 512
    for repeated in (8 * context, 100 * context):
        response = shared.client.post("/v1/completions", json={"prompt": "a b " * (repeated // 4)})
        assert error_of(response)["code"] == "context_length_exceeded"
    assert lengths == [6 * context, 6 * context]


def test_everything_was_used_once_before_the_first_request(
    text_side: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, rendered = set(), set()
    encode, render = Tokenizer.encode, ChatTemplate.render

    def spy_encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        encoded.add(threading.current_thread().name)
        return encode(self, text, add_special_tokens)

    def spy_render(self: ChatTemplate, *args: object, **kwargs: object) -> str:
        rendered.add(threading.current_thread().name)
        return render(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Tokenizer, "encode", spy_encode)
    monkeypatch.setattr(ChatTemplate, "render", spy_render)
    engine = sentence_engine(text_side)
    scripted_app(engine, text_side.tokenizer, text_side.template)
    pool = {f"headstart-tokenize_{index}" for index in range(NUM_THREADS)}
    here = threading.current_thread().name
    assert encoded == rendered == {*pool, here}
    assert not engine.requests
