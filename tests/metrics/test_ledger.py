"""The ledger's parts sum to the time from submission to the first token, whatever happened in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.cost import StepWork
from headstart.core.events import LoadBegan, LoadEnded, RequestAdded, RequestFinished, RequestPreempted, StepRetired
from headstart.core.step import ModelOutput
from headstart.metrics.ledger import PARTS, LedgerBook
from tests.core.harness import FakeWorker, make_core, make_spec


def step(begin: float, end: float, *shares: tuple[str, float], sample: float = 0.0) -> StepRetired:
    return StepRetired(0, begin, end, sample, 1, shares, StepWork(), end - begin, 0.0)


def test_each_part_of_a_chunked_prefill() -> None:
    book = LedgerBook()
    book.observe(
        [
            RequestAdded("a", arrival_time=0.0, submit_time=1.0, time=1.5),
            step(2.0, 4.0, ("a", 0.25)),
            RequestPreempted("b", 4.0),
            step(4.0, 5.0),  # nothing of "a" in it
            step(5.0, 6.5, ("a", 1.0), sample=0.5),
        ]
    )
    assert dict(book.take("a")) == {
        "admit": 0.5,
        "queue": 0.5,
        "prefill": pytest.approx(0.5 + 1.0),
        "interference": pytest.approx(1.5 + 1.0),
        "sample": 0.5,
    }
    assert book.take("a") == ()


def test_waiting_for_a_tier_is_load_and_what_is_before_it_queue() -> None:
    book = LedgerBook()
    book.observe(
        [
            RequestAdded("a", arrival_time=0.0, submit_time=0.0, time=0.0),
            LoadBegan("a", 1.0),
            LoadBegan("unknown", 1.0),
            LoadEnded("a", 3.0, 2, 2),
            step(3.5, 4.0, ("a", 1.0)),
        ]
    )
    assert dict(book.take("a")) == {
        "admit": 0, "queue": 1.5, "load": 2.0, "prefill": 0.5, "interference": 0, "sample": 0,
    }  # fmt: skip


def test_sampling_of_steps_before_the_last_is_others_work() -> None:
    book = LedgerBook()
    book.observe([RequestAdded("a", 0, 0, 0), step(0, 2, ("a", 1.0), sample=1.0), step(2, 3, ("a", 1.0), sample=0.25)])
    assert dict(book.take("a")) == {"admit": 0, "queue": 0, "prefill": 1.75, "interference": 1.0, "sample": 0.25}


def test_accounts_of_requests_that_end_without_a_token_are_closed() -> None:
    book = LedgerBook()
    book.observe([RequestAdded("a", 0, 0, 0), RequestFinished("a", 1)])
    assert len(book) == 1, "still there for the news of this step"
    book.observe([])
    assert len(book) == 0
    book.observe([step(1, 2, ("a", 1.0))])


@given(
    depth=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    times=st.lists(st.floats(0.001, 2.0), min_size=8, max_size=8),
    samples=st.lists(st.floats(0, 3.0), min_size=4, max_size=4),
)
def test_parts_sum_to_the_time_to_the_first_token(
    depth: int, lengths: list[int], times: list[float], samples: list[float]
) -> None:
    core = make_core(num_blocks=24, chunk=12, mixed=6, max_num_seqs=4, pipeline_depth=depth)
    worker, book = FakeWorker(4, vocab_size=5), LedgerBook()
    now, turn, ledgers, results = 0.0, 0, {}, []
    submitted: dict[str, float] = {}
    for index, length in enumerate(lengths):
        spec = make_spec(f"r{index}", [index] * length, max_tokens=9, arrival=now)
        now += times[index]
        core.add_request(spec, now)
        submitted[spec.request_id] = spec.arrival_time
    while core.has_work:
        begun = core.begin_step(now)
        now += times[turn % 8] / 10
        if begun is not None:
            results.append(worker.execute(begun))
            if len(results) < depth:
                continue
        turn += 1
        now += times[turn % 8]
        result = results.pop(0)
        outputs = core.finish_step(ModelOutput(result.step_id, result.chunks, samples[turn % 4]), now)
        book.observe(core.take_events())
        for output in outputs:
            if output.token_ids and output.request_id not in ledgers:
                ledgers[output.request_id] = (book.take(output.request_id), output.time)
    assert set(ledgers) == set(submitted)
    for name, (ledger, first_token) in ledgers.items():
        assert sum(seconds for _, seconds in ledger) == pytest.approx(first_token - submitted[name])
        assert all(seconds >= -1e-9 for _, seconds in ledger)
        assert [part for part, _ in ledger] == [part for part in PARTS if part in dict(ledger)]
    book.observe([])
    assert len(book) == 0
