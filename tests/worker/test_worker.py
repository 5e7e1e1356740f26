"""The worker from configuration to tokens: settled sizes, a clean warm-up, clear refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from headstart.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from headstart.executor.base import StartupError
from headstart.hub import files_of_folder
from headstart.ops import HeadShape, KVFormat, make_ops
from headstart.perf.model_spec import read_model_spec
from headstart.worker import Worker
from headstart.worker.worker import settle_dtype, settle_kv_format
from tests.fixtures.stories import shared_data
from tests.worker.driver import GREEDY, Driver, Job

KB = 1024


def block_bytes(kv_format: KVFormat = KVFormat.FLOAT32) -> int:
    """Of the five layers of the model here."""
    ops = make_ops(torch.device("cpu"), torch.float32, threads=1)
    return 5 * ops.kv_layout(HeadShape(8, 4, 8), 16, kv_format).block_bytes


@pytest.fixture(scope="module")
def files():
    return files_of_folder(shared_data("models", "stories260K-hf"))


@pytest.fixture(scope="module")
def spec(files):
    return read_model_spec(files)


@pytest.fixture(autouse=True)
def _threads_given_back():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def config(memory: int | None = 2048 * KB, **model) -> Config:
    return Config(
        model=ModelConfig(threads=1, quantization="none", **model),
        cache=CacheConfig(kv_cache_memory=memory),
        scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8),
    )


def test_start_settles_sizes_and_serves_golden_tokens(files, spec):
    golden = json.loads((files.root / "golden_greedy.json").read_text())["greedy_ids"]
    stages = []
    worker = Worker(config(), files, spec)
    info = worker.start(lambda stage, done, total: stages.append((stage, done, total)))
    assert info.block_size == 16
    assert info.num_blocks == 2048 * KB // block_bytes()
    assert info.max_model_len == 512
    assert info.vocab_size == 512
    assert torch.get_num_threads() == 1
    for settled in ("cpu", "float32", "1 threads", f"{info.num_blocks * 16:,} tokens", "weights 1 MB", "2 MB"):
        assert settled in info.summary
    assert stages[-1][0] == "warm-up"
    assert stages[-1][1] == stages[-1][2]

    driver = Driver(worker.execute, info.num_blocks, info.block_size)
    job = Job("a", (1,), replace(GREEDY, max_tokens=40))
    while not job.done:
        driver.run((job, 1))
    assert job.token_ids == golden[:40]
    worker.reset()
    driver.run((Job("a", (1,)), 1))  # the id is free again


def test_the_pool_is_never_larger_than_all_requests_need(files, spec):
    info = Worker(config(memory=None), files, spec).start(None)
    assert info.num_blocks == 8 * 512 // 16


def test_a_shorter_context(files, spec):
    info = Worker(config(memory=None, max_model_len=100), files, spec).start(None)
    assert info.max_model_len == 100
    assert info.num_blocks == 8 * 7


def test_the_smallest_pool_warms_up(files, spec):
    info = Worker(config(memory=block_bytes()), files, spec).start(None)
    assert info.num_blocks == 1


def test_half_precision_pool_holds_twice_as_many_tokens(files, spec):
    half = replace(config(), cache=CacheConfig(kv_cache_memory=1024 * KB, kv_cache_dtype="bfloat16"))
    info = Worker(half, files, spec).start(None)
    assert info.num_blocks == 1024 * KB // block_bytes(KVFormat.BFLOAT16)
    assert block_bytes() == 2 * block_bytes(KVFormat.BFLOAT16)
    assert "bfloat16" in info.summary


def test_a_context_that_the_pool_cannot_hold(files, spec):
    with pytest.raises(StartupError, match=r"would hold 48 tokens .* needs 512 tokens"):
        Worker(config(memory=3 * block_bytes(), max_model_len=512), files, spec).start(None)


def test_a_context_that_the_model_does_not_have(files, spec):
    with pytest.raises(StartupError, match=r"max_model_len is 513, but the model's context is 512"):
        Worker(config(max_model_len=513), files, spec).start(None)


def test_more_memory_than_there_is(files, spec):
    with pytest.raises(StartupError, match="kv_cache_memory"):
        Worker(replace(config(1 << 50), scheduler=SchedulerConfig(max_num_seqs=65_536)), files, big(spec)).start(None)


def big(spec):
    """The same model, said to have a context so long that the cap on the pool's size does not matter."""
    return replace(spec, max_position_embeddings=10_000_000)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there(files, spec):
    with pytest.raises(StartupError, match="no CUDA device"):
        Worker(config(device="cuda"), files, spec).start(None)


def test_auto_dtype(spec):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    half = replace(spec, torch_dtype="float16")
    assert settle_dtype("auto", cpu, half) == torch.float32
    assert settle_dtype("auto", cuda, half) == torch.float16
    assert settle_dtype("auto", cuda, replace(spec, torch_dtype="bfloat16")) == torch.bfloat16
    assert settle_dtype("bfloat16", cpu, half) == torch.bfloat16


def test_keys_and_values_take_half_of_a_float_beside_quantized_weights() -> None:
    assert settle_kv_format("auto", torch.float32, True) is KVFormat.FLOAT16
    assert settle_kv_format("auto", torch.float32, False) is KVFormat.FLOAT32
    assert settle_kv_format("auto", torch.bfloat16, True) is KVFormat.BFLOAT16
    assert settle_kv_format("int8", torch.float32, True) is KVFormat.INT8
    assert settle_kv_format("float32", torch.float32, True) is KVFormat.FLOAT32
