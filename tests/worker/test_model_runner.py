"""The runner on a real model: stories260K's golden tokens however they are scheduled, and errors that stay alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from headstart.core.request import SamplingParams
from headstart.hub import files_of_folder
from headstart.kv.pool import KVPool
from headstart.models import Decoder, load_model
from headstart.ops import KVFormat
from headstart.perf.model_spec import read_model_spec
from headstart.worker.model_runner import ModelRunner
from headstart.worker.threads import single_thread
from tests.fixtures.stories import shared_data
from tests.worker.driver import GREEDY, Driver, Job

BLOCK = 8
BLOCKS = 200
NO_CHUNKING = 10**6


@pytest.fixture(scope="module", autouse=True)
def _inference():
    with torch.inference_mode(), single_thread():  # one thread: the model is tiny
        yield


@pytest.fixture(scope="module")
def files():
    return files_of_folder(shared_data("models", "stories260K-hf"))


@pytest.fixture(scope="module")
def spec(files):
    return read_model_spec(files)


@pytest.fixture(scope="module")
def decoder(files, spec) -> Decoder:
    return load_model(files, spec, device=torch.device("cpu"), dtype=torch.float32, progress=None)


@pytest.fixture(scope="module")
def golden(files) -> list[int]:
    return json.loads((files.root / "golden_greedy.json").read_text())["greedy_ids"]


def runner_of(decoder, spec, blocks: int = BLOCKS, block_size: int = BLOCK) -> ModelRunner:
    pool = KVPool(decoder.kv_layout(block_size, KVFormat.FLOAT32), spec.num_layers, blocks, "cpu")
    return ModelRunner(decoder, pool, spec.vocab_size)


@pytest.fixture
def runner(decoder, spec) -> ModelRunner:
    return runner_of(decoder, spec)


@pytest.fixture
def driver(runner) -> Driver:
    return Driver(runner.execute, BLOCKS, BLOCK)


def decode_all(driver: Driver, *jobs: Job) -> None:
    while open_jobs := [job for job in jobs if not job.done]:
        driver.run(*[(job, NO_CHUNKING) for job in open_jobs])


def test_golden_tokens_by_greedy_decoding(driver, golden):
    job = Job("a", (1,))
    decode_all(driver, job)
    assert job.token_ids == golden


@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
def test_golden_tokens_continue_a_chunked_prompt(driver, golden, chunk):
    job = Job("a", (1, *golden[:150]), replace(GREEDY, max_tokens=40))
    while job.computed < len(job.prompt):
        driver.run((job, chunk))
    decode_all(driver, job)
    assert job.token_ids == golden[150:190]


def test_interleaved_requests_do_not_touch_each_other(driver, golden):
    jobs = [Job(str(cut), (1, *golden[:cut]), replace(GREEDY, max_tokens=30)) for cut in (0, 5, 40, 41, 100, 200)]
    while open_jobs := [job for job in jobs if not job.done]:
        chosen = driver.random.sample(open_jobs, driver.random.randint(1, len(open_jobs)))
        driver.run(*[(job, driver.random.randint(1, 17)) for job in chosen])
    for job in jobs:
        cut = int(job.name)
        assert job.token_ids == golden[cut : cut + 30]


def test_preempted_requests_resume_with_other_blocks(driver, golden):
    """The worker keeps the tokens that it sampled: after preemption they are computed again, from 0, in new blocks."""
    jobs = [Job("a", (1,), replace(GREEDY, max_tokens=60)), Job("b", (1, *golden[:33]), replace(GREEDY, max_tokens=60))]
    for round_ in range(5):
        for _ in range(10):
            driver.run(*[(job, NO_CHUNKING) for job in jobs])
        driver.preempt(jobs[round_ % 2])
        driver.run((jobs[round_ % 2], 7), (jobs[1 - round_ % 2], 1))  # resumption may be chunked, too
    decode_all(driver, *jobs)
    assert jobs[0].token_ids == golden[:60]
    assert jobs[1].token_ids == golden[33:93]


def test_decodes_scheduled_before_their_token_is_known(runner, driver, golden):
    """Depth 2: each step is made before the one before it has been read."""
    jobs = [Job("a", (1,), replace(GREEDY, max_tokens=50)), Job("b", (1, *golden[:20]), replace(GREEDY, max_tokens=50))]
    steps = []
    while not all(job.done for job in jobs):
        chosen = [job for job in jobs if not job.done]
        steps.append((driver.step(*[(job, 13) for job in chosen]), chosen))
    for step, chosen in steps:
        driver.collect(runner.execute(step), chosen)
    assert jobs[0].token_ids == golden[:50]
    assert jobs[1].token_ids == golden[20:70]


@pytest.mark.parametrize(("block_size", "blocks"), [(1, 400), (16, 30), (512, 3)])
def test_any_block_size(decoder, spec, golden, block_size, blocks):
    driver = Driver(runner_of(decoder, spec, blocks, block_size).execute, blocks, block_size, seed=block_size)
    job = Job("a", (1,), replace(GREEDY, max_tokens=100))
    decode_all(driver, job)
    assert job.token_ids == golden[:100]


def test_finished_requests_are_forgotten_and_ids_may_return(runner, driver, golden):
    first, other = Job("a", (1,), replace(GREEDY, max_tokens=3)), Job("b", (1,), replace(GREEDY, max_tokens=9))
    decode_all(driver, first, other)
    driver.finish(first)
    driver.finish(other)
    again = Job("a", (1, *golden[:10]), replace(GREEDY, max_tokens=5))
    driver.run((again, NO_CHUNKING))
    assert runner.num_requests == 1
    decode_all(driver, again)
    assert again.token_ids == golden[10:15]
    driver.finish(again)
    assert driver.run().chunks == ()
    assert runner.num_requests == 0


def test_reset_forgets_everything(runner, driver):
    driver.run((Job("a", (1,)), 1))
    runner.reset()
    assert runner.num_requests == 0


SAMPLED = [
    SamplingParams(max_tokens=12, temperature=0.9, seed=1),
    SamplingParams(max_tokens=12, temperature=1.3, top_k=20, seed=2, logprobs=3),
    SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=3),
    SamplingParams(max_tokens=12, temperature=0.0, presence_penalty=0.5, frequency_penalty=0.4, logprobs=0),
]


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6))
def test_sampled_tokens_and_logprobs_do_not_depend_on_the_schedule(decoder, spec, golden, seed):
    def jobs() -> list[Job]:
        return [Job(str(i), (1, *golden[: 7 * i]), params) for i, params in enumerate(SAMPLED)]

    def driver_of(seed: int) -> Driver:
        return Driver(runner_of(decoder, spec).execute, BLOCKS, BLOCK, seed)

    alone = jobs()
    for job in alone:
        decode_all(driver_of(0), job)
    mixed, driver = jobs(), driver_of(seed)
    while open_jobs := [job for job in mixed if not job.done]:
        chosen = driver.random.sample(open_jobs, driver.random.randint(1, len(open_jobs)))
        if driver.random.random() < 0.1:
            driver.preempt(chosen[0])
        driver.run(*[(job, driver.random.randint(1, 9)) for job in chosen])
    for one, other in zip(alone, mixed, strict=True):
        assert one.token_ids == other.token_ids
        found = [[chunk.logprobs for chunk in job.outputs if chunk.logprobs] for job in (one, other)]
        assert found[0] == found[1]
        assert len(found[0]) == (12 if one.params.logprobs is not None else 0)


class PoisonedDecoder:
    """A decoder that gives a NaN in the hidden state of every row that holds one token id, and counts LM-head rows."""

    def __init__(self, decoder: Decoder, token_id: int) -> None:
        self._decoder = decoder
        self._token_id = token_id
        self.rows_with_logits = 0

    def kv_layout(self, block_size, kv_format):
        return self._decoder.kv_layout(block_size, kv_format)

    def forward(self, token_ids, layout, pool, before_layer):
        hidden = self._decoder.forward(token_ids, layout, pool, before_layer)
        hidden[token_ids == self._token_id, 0] = math.nan
        return hidden

    def logits(self, hidden):
        self.rows_with_logits += len(hidden)
        return self._decoder.logits(hidden)


def test_logits_that_are_not_finite_end_one_request_and_no_other(decoder, spec, golden):
    poison = 500
    assert poison not in golden
    runner = runner_of(PoisonedDecoder(decoder, poison), spec)
    driver = Driver(runner.execute, BLOCKS, BLOCK)
    healthy = [
        Job("a", (1,), replace(GREEDY, max_tokens=20)),
        Job("b", (1, *golden[:9]), replace(GREEDY, max_tokens=20)),
    ]
    broken = Job("broken", (1, 5, poison))
    asked = replace(GREEDY, prompt_logprobs=0)
    broken_inside = Job("inside", (1, poison, 5), asked)  # only its prompt logprobs meet the NaN
    driver.run((healthy[0], 1), (broken, NO_CHUNKING), (broken_inside, NO_CHUNKING), (healthy[1], 4))
    for job in (broken, broken_inside):
        assert "not finite" in job.outputs[0].error
        assert not job.token_ids
        assert not job.outputs[0].prompt_logprobs
    # A step in flight may name a failed request once more.
    late = driver.run((healthy[0], 1), (broken, 1), (healthy[1], NO_CHUNKING))
    assert [bool(chunk.error) for chunk in late.chunks] == [False, True, False]
    driver.finish(broken)
    driver.finish(broken_inside)
    decode_all(driver, *healthy)
    assert healthy[0].token_ids == golden[:20]
    assert healthy[1].token_ids == golden[9:29]


def test_ids_outside_the_vocabulary_end_one_request(driver, golden):
    wrong, right = Job("wrong", (1, 512)), Job("right", (1,), replace(GREEDY, max_tokens=3))
    driver.run((wrong, NO_CHUNKING), (right, 1))
    assert "512 is outside the vocabulary" in wrong.outputs[0].error
    decode_all(driver, right)
    assert right.token_ids == golden[:3]


def test_only_rows_that_sample_see_the_lm_head(decoder, spec, golden):
    counting = PoisonedDecoder(decoder, -1)
    driver = Driver(runner_of(counting, spec).execute, BLOCKS, BLOCK)
    one, two = Job("one", (1, *golden[:60])), Job("two", (1,))
    output = driver.run((one, 32), (two, 1))
    assert counting.rows_with_logits == 1
    assert output.sample_seconds > 0
    driver.run((one, 20))
    assert counting.rows_with_logits == 1
    driver.run((one, 20), (two, 1))
    assert counting.rows_with_logits == 3


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_prompt_logprobs_are_those_of_transformers(files, driver, golden, chunk):
    prompt = (1, *golden[:45])
    with torch.inference_mode():
        model = LlamaForCausalLM.from_pretrained(files.root, dtype=torch.float32)
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    job = Job("a", prompt, SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=3, logprobs=1))
    while job.computed < len(prompt):
        driver.run((job, chunk))
    driver.run((job, 1))
    found = [entry for output in job.outputs for entry in output.prompt_logprobs]
    assert [entry.token_id for entry in found] == list(prompt[1:])
    for row, entry in zip(expected, found, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    assert job.outputs[-1].prompt_logprobs == ()
    assert job.outputs[-1].logprobs[0].token_id == job.token_ids[-1]


def test_a_prompt_alone_may_ask_for_its_logprobs(driver, golden):
    job = Job("a", (1, *golden[:5]), SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0))
    (output,) = driver.run((job, 5)).chunks  # all but the last token: nothing is sampled
    assert output.token_ids == ()
    assert [entry.token_id for entry in output.prompt_logprobs] == golden[:5]
    assert all(entry.rank == 1 for entry in output.prompt_logprobs)
