"""The disk tier through the product: prompts survive a restart, foreign files do no harm, odd settings are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.config import CacheConfig, Config, ConfigError, ModelConfig, validate
from headstart.core.request import SamplingParams
from headstart.executor.base import StartupError
from headstart.llm import LLM
from tests.fixtures.stories import make_stories_folder

PROMPT = [index * 7 % 500 + 3 for index in range(400)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    return str(make_stories_folder(tmp_path / "stories"))


def make(model: str, folder: Path, **options: object) -> LLM:
    return LLM(model, threads=1, kv_disk=str(folder), **options)


def test_a_prompt_survives_a_restart(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with make(model, folder) as llm:
        cold = llm.generate([PROMPT], GREEDY)[0]
        llm.close()  # and once more at the end
    with make(model, folder) as llm:
        warm = llm.generate([PROMPT], GREEDY)[0]
        stats = llm.stats()
    assert warm.token_ids == cold.token_ids
    assert stats.prompt_tokens_loaded in (0, 384)  # all, or, on a machine that computes faster than it reads, nothing
    assert stats.loads == (stats.prompt_tokens_loaded > 0)
    with make(model, folder, block_size=32) as llm:
        assert llm.generate([PROMPT], GREEDY)[0].token_ids == cold.token_ids
        assert llm.stats().loads == 0, "blocks of another size are another model's"


def test_one_folder_one_server(model: str, tmp_path: Path) -> None:
    with make(model, tmp_path / "kv"), pytest.raises(StartupError, match="used by another server"):
        make(model, tmp_path / "kv")
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="no folder"):
        make(model, tmp_path / "file")


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (CacheConfig(kv_disk_size=1 << 30), "without kv_disk"),
        (CacheConfig(kv_disk=""), "empty"),
        (CacheConfig(kv_disk="x", kv_disk_size=1), "from"),
        (CacheConfig(kv_ram=1 << 30), "accelerators"),
        (CacheConfig(kv_disk="x", prefix_cache=False), "prefix_cache"),
    ],
)
def test_settings_without_effect_are_refused(cache: CacheConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(Config(model=ModelConfig(), cache=cache))
