"""The whole engine on a real, small model (stories260K): launched as the server launches it, and offline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from headstart.config import CacheConfig, Config, ConfigError, ModelConfig, SchedulerConfig
from headstart.core.request import EngineRequest, FinishReason, SamplingParams
from headstart.engine import AsyncEngine
from headstart.executor.base import StartupError
from headstart.hub import resolve
from headstart.launch import launch_engine
from headstart.llm import LLM
from headstart.perf.model_spec import read_model_spec
from tests.fixtures.stories import make_stories_folder, shared_data

KV_BYTES = 8 * 1024 * 1024
BOS = 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stories_folder(tmp_path_factory.mktemp("stories"))


@pytest.fixture(scope="module")
def golden() -> list[int]:
    """The greedy continuation of BOS alone."""
    path = shared_data("models", "stories260K-hf", "golden_greedy.json")
    ids: list[int] = json.loads(path.read_text(encoding="utf-8"))["greedy_ids"]
    return ids


def make_config(model: Path, *, max_model_len: int | None = None) -> Config:
    return Config(
        model=ModelConfig(model=str(model), threads=1, max_model_len=max_model_len, quantization="none"),
        cache=CacheConfig(kv_cache_memory=KV_BYTES),
        scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=16),
    )


def launch(config: Config) -> AsyncEngine:
    files = resolve(config.model.model, progress=None)
    return launch_engine(config, files, read_model_spec(files))


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[AsyncEngine]:
    launched = launch(make_config(model))
    yield launched
    await launched.shutdown()


def make_request(request_id: str, prompt: tuple[int, ...] = (BOS,), max_tokens: int = 100) -> EngineRequest:
    return EngineRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), time.monotonic())


async def test_served_streams_are_exact_whatever_runs_beside_them_and_leave_nothing(
    engine: AsyncEngine, golden: list[int]
) -> None:
    async def complete(index: int) -> None:
        prompt = (BOS, *golden[: index % 30])
        tokens: list[int] = []
        async for output in engine.generate(make_request(f"r{index}", prompt, 20)):
            tokens += output.token_ids
        assert tokens == golden[index % 30 :][:20]

    async def leave(index: int) -> None:
        async with contextlib.aclosing(engine.generate(make_request(f"leaves{index}"))) as stream:
            await anext(stream)

    await asyncio.gather(*(complete(index) for index in range(64)), *(leave(index) for index in range(16)))
    stats = await engine.ping()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    assert stats.prompt_tokens_cached > 0


async def test_a_damaged_model_file_is_one_line(model: Path, tmp_path: Path) -> None:
    damaged = make_stories_folder(tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    launched = launch(make_config(damaged))
    with pytest.raises(StartupError) as caught:
        await launched.wait_ready()
    await launched.shutdown()
    assert "model.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    small_steps = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
    with LLM(str(model), threads=1, quantization="none", kv_cache_memory=KV_BYTES, **small_steps) as made:
        yield made


GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


def test_offline_tokens_are_the_golden_ones(llm: LLM, golden: list[int]) -> None:
    params = SamplingParams(max_tokens=256, temperature=0.0)
    (completion,) = llm.generate([[BOS]], params, ignore_eos=True)
    assert list(completion.token_ids) == golden[:256]
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.text.startswith("Once upon a time")
    assert sum(seconds for _, seconds in completion.ledger) > 0


def test_offline_prompts_are_texts_or_ids_and_come_back_in_order(llm: LLM) -> None:
    texts = [f"Once there was a {animal}" for animal in ("cat", "dog", "fish", "bird")]
    by_text = llm.generate(texts, GREEDY)
    by_ids = llm.generate([llm.tokenizer.encode(text) for text in reversed(texts)], GREEDY)
    assert [one.text for one in by_text] == [one.text for one in reversed(by_ids)]
    assert len({one.text for one in by_text}) == 4
    stats = llm.stats()
    assert stats.num_free_blocks == stats.num_blocks


def test_offline_stop_strings_end_a_text_before_them(llm: LLM) -> None:
    (whole,) = llm.generate(["Once upon a time"], GREEDY)
    word = whole.text.split()[5]
    (stopped,) = llm.generate(["Once upon a time"], GREEDY, stop=[word])
    assert stopped.text == whole.text[: whole.text.index(word)]
    assert (stopped.finish_reason, stopped.stop) == (FinishReason.STOP, word)
    assert stopped.num_cached_tokens == 0 or stopped.num_cached_tokens < len(stopped.prompt_token_ids)
    assert len(stopped.token_ids) < 64


@pytest.fixture(scope="module")
def long_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The same model with a longer context; what it says there is of no use, but is the same each time."""
    folder = make_stories_folder(tmp_path_factory.mktemp("long"))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 2048}))
    # 2,560 bytes a token: about 2,050 tokens, four times the hot prefix.
    options = {"max_num_batched_tokens": 256, "max_num_seqs": 4, "max_model_len": 1536, "kv_cache_memory": 5 << 20}
    with LLM(str(folder), threads=1, quantization="none", **options) as made:
        yield made


def ids(length: int, seed: int) -> list[int]:
    return [(seed * 7919 + index * index * 31 + index * 17) % 500 + 3 for index in range(length)]


def test_identical_prompts_at_once_compute_their_prefix_once(long_llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0)
    before = long_llm.stats().prompt_tokens_computed
    answers = long_llm.generate([ids(1_000, 1)] * 6, params, ignore_eos=True)
    assert long_llm.stats().prompt_tokens_computed - before == 1_000 + 5 * 8, "62 whole blocks were shared"
    assert len({tuple(answer.token_ids) for answer in answers}) == 1


def test_a_hot_prefix_survives_a_burst_of_twice_the_cache(long_llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0)
    hot = ids(512, 2)
    for question in range(4):
        long_llm.generate([[*hot, question + 3]], params, ignore_eos=True)
    before = long_llm.stats()
    pool_tokens = before.num_blocks * 16
    burst = [ids(256, 100 + index) for index in range(2 * pool_tokens // 256 + 1)]
    for prompt in burst:
        long_llm.generate([prompt], params, ignore_eos=True)
    after = long_llm.stats()
    assert after.evicted_blocks - before.evicted_blocks > before.num_blocks
    long_llm.generate([[*hot, 50]], params, ignore_eos=True)
    assert long_llm.stats().prompt_tokens_cached - after.prompt_tokens_cached == 512


def test_offline_chat_renders_the_template(llm: LLM) -> None:
    completion = llm.chat([{"role": "user", "content": "Tell me about a cat."}], SamplingParams(max_tokens=8))
    text = llm.tokenizer.decode(completion.prompt_token_ids)
    assert text.strip() == "user: Tell me about a cat.\nassistant:"


def test_offline_chat_takes_control_tokens_in_messages_as_text(llm: LLM) -> None:
    completion = llm.chat([{"role": "user", "content": "cat</s><s>dog"}], SamplingParams(max_tokens=1))
    marks = {llm.tokenizer.bos_token_id, *llm.tokenizer.eos_token_ids}
    assert [token for token in completion.prompt_token_ids if token in marks] == [llm.tokenizer.bos_token_id]


def test_offline_options_are_checked(model: Path, llm: LLM) -> None:
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        LLM(str(model), max_num_seq=3)
    for name in ("port", "token_memory", "served_model_name", "on_slo_miss"):
        with pytest.raises(ConfigError, match=f"{name} is a setting of the server .* leave it out"):
            LLM(str(model), **{name: 3})
    with pytest.raises(ConfigError, match=r"kv_cache_memory: 'two' is not a size"):
        LLM(str(model), kv_cache_memory="two")
    with pytest.raises(ConfigError, match=r"threads: '2' is not a whole number"):
        LLM(str(model), threads="2")
    with pytest.raises(ConfigError, match=r"model: 5 is not a string"):
        LLM(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 prompts but 1"):
        llm.generate(["a", "b"], [GREEDY])


@pytest.mark.parametrize("prompts", ["Once", {"a": 1}, None, [None], [["a"]], 5])
def test_offline_prompts_that_are_none_are_refused_and_the_engine_goes_on(llm: LLM, prompts: Any) -> None:
    with pytest.raises(TypeError, match="prompt"):
        llm.generate(prompts, GREEDY)
    assert llm.generate(["Once"], GREEDY)[0].token_ids


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_model_len": 4096}, ConfigError, "4096.*512"),  # the model says it, before anything is loaded
        ({"max_model_len": 512, "kv_cache_memory": 1 << 16}, StartupError, "512"),
    ],
)
def test_a_context_that_cannot_be_served_is_one_line(
    model: Path, options: dict[str, int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(str(model), threads=1, quantization="none", **options)
