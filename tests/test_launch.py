"""The composition root of the API process: settled configurations and what the engine process is told."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headstart import replica
from headstart.config import CacheConfig, Config, ConfigError, ModelConfig, SchedulerConfig, ServerConfig
from headstart.core.request import EngineRequest, SamplingParams
from headstart.engine.child import BuiltEngine
from headstart.engine.driver import StepDriver
from headstart.engine.process import engine_environment
from headstart.engine.step_log import read_step_log
from headstart.executor.base import StartupError
from headstart.hub import ModelError, files_of_folder
from headstart.hub.generation_config import SamplingDefaults
from headstart.launch import EngineSetup, encode_setup, load_model, settle_config
from headstart.perf.model_spec import read_model_spec
from tests.fixtures.stories import make_stories_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_stories_folder(tmp_path / "stories")


def config_of(folder: Path, **model: object) -> Config:
    return Config(
        ModelConfig(model=str(folder), threads=1, quantization="none", **model),  # type: ignore[arg-type]
        CacheConfig(kv_cache_memory=1 << 20),
        SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=2),
    )


def test_device_and_model_settle_what_is_left_open(folder: Path) -> None:
    spec = read_model_spec(files_of_folder(folder))
    config = config_of(folder)
    settled = settle_config(config, spec)
    assert settled.scheduler.pipeline_depth == 1
    assert settled.scheduler.attention_horizon == spec.attention_horizon
    assert settle_config(settled, spec) == settled
    on_cuda = replace(config, model=replace(config.model, device="cuda"))
    assert settle_config(on_cuda, spec).scheduler.pipeline_depth == 2


def test_what_was_asked_for_stays(folder: Path) -> None:
    spec = read_model_spec(files_of_folder(folder))
    asked = replace(config_of(folder).scheduler, pipeline_depth=2, attention_horizon=math.inf)
    assert settle_config(replace(config_of(folder), scheduler=asked), spec).scheduler == asked


def test_a_context_that_the_model_does_not_have(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 513, but the model's context is 512"):
        settle_config(config_of(folder, max_model_len=513), read_model_spec(files_of_folder(folder)))


def test_a_tokenizer_of_another_model(folder: Path) -> None:
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    content = {"id": 512, "content": "<|extra|>", "special": True, "single_word": False}
    document["added_tokens"].append(content | {"lstrip": False, "rstrip": False, "normalized": False})
    path.write_text(json.dumps(document))
    with pytest.raises(ModelError, match="the tokenizer has 513 tokens, but the model only 512"):
        load_model(config_of(folder))


def test_sampling_defaults_come_from_the_model_unless_told_otherwise(folder: Path) -> None:
    assert load_model(config_of(folder)).defaults == SamplingDefaults()
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 7}))
    assert load_model(config_of(folder)).defaults == SamplingDefaults(temperature=0.25, top_k=7)
    assert load_model(config_of(folder, generation_config="none")).defaults == SamplingDefaults()


@pytest.fixture
def root_level() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


@pytest.mark.usefixtures("root_level")
def test_the_engine_logs_as_much_as_the_server(folder: Path) -> None:
    files = files_of_folder(folder)
    config = replace(config_of(folder), server=ServerConfig(log_level="error"))
    payload = encode_setup(EngineSetup(config, files, read_model_spec(files)))
    built = replica._build(payload, lambda stage, done, total: None)
    built.executor.shutdown()
    assert logging.getLogger().level == logging.ERROR
    assert built.step_timeout == 300.0


def test_the_engine_is_not_told_the_servers_secrets() -> None:
    environment = engine_environment({"HEADSTART_API_KEY": "secret", "OMP_NUM_THREADS": "2", "PATH": "/bin"})
    assert "secret" not in environment.values()
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["PATH"] == "/bin"


def test_the_engine_keeps_what_it_keeps_where_the_user_said() -> None:
    assert engine_environment({"HEADSTART_CACHE": "/place"})["HEADSTART_CACHE"] == "/place"


def build(folder: Path, **server: object) -> BuiltEngine:
    files = files_of_folder(folder)
    config = replace(config_of(folder), server=ServerConfig(**server))  # type: ignore[arg-type]
    return replica._build(
        encode_setup(EngineSetup(config, files, read_model_spec(files))), lambda stage, done, total: None
    )


def answer(built: BuiltEngine, driver: StepDriver) -> None:
    built.core.add_request(EngineRequest("r", (1, 5, 9), SamplingParams(max_tokens=4, temperature=0.0), 0.0), 0.0)
    while built.core.has_work:
        driver.fill()
        driver.retire(wait=True)


def test_a_first_start_learns_what_steps_cost_and_the_next_one_knows_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    swept = []
    monkeypatch.setattr(replica, "learn_first_costs", _counted(replica.learn_first_costs, swept))
    for _ in range(2):
        built = build(folder)
        built.executor.shutdown()
        built.on_end()
        assert not built.core.has_work
    assert len(swept) == 1
    (kept,) = (tmp_path / "cache" / "costs").glob("*.json")
    assert all(value > 0 for value in json.loads(kept.read_text())["coefficients"].values())


def _counted(function: Callable[..., None], calls: list[object]) -> Callable[..., None]:
    def wrapper(*args: object) -> None:
        calls.append(args)
        function(*args)

    return wrapper


def test_a_step_log_has_every_step_of_a_request(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    built = build(folder, step_log=str(path))
    answer(built, StepDriver(built.core, built.executor, time.monotonic, on_events=built.on_events))
    built.executor.shutdown()
    built.on_end()
    steps = read_step_log(path)
    assert [step.work["num_prefill_tokens"] for step in steps] == [3, 0, 0, 0]
    assert [step.work["num_decodes"] for step in steps] == [0, 1, 1, 1]
    assert all(step.seconds > 0 and step.predicted_seconds > 0 for step in steps)
    assert sum(built.core.stats().step_ratios) == 4


def test_a_step_log_that_cannot_be_written_is_said_before_the_model_is_loaded(folder: Path) -> None:
    with pytest.raises(StartupError, match="the step log /none/steps cannot be written"):
        build(folder, step_log="/none/steps")
