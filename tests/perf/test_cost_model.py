"""What the cost model promises, whatever is observed; that it learns; that what it learned is kept."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.cost import StepWork
from headstart.perf.cost_model import Coefficients, FittedCostModel, fit, fit_robustly, relative_error, scaled
from headstart.perf.cost_store import CostKey, CostStore, KeptCostModel

TRUE = Coefficients(step=0.003, row=8e-4, few_rows=3e-4, prefill_context=4e-7, decode_context=1.6e-6, sample=3.6e-4)
WORK = st.builds(
    StepWork,
    num_prefill_tokens=st.integers(0, 4096),
    num_prefills=st.integers(0, 64),
    prefill_context=st.floats(0, 1e8),
    num_decodes=st.integers(0, 64),
    decode_context=st.floats(0, 1e6),
    num_samples=st.integers(0, 64),
)
SECONDS = st.one_of(st.floats(1e-5, 10), st.sampled_from([0.0, -1.0, math.nan, math.inf, 1e-300, 1e300]))


def some_work(rng: random.Random) -> StepWork:
    work = StepWork()
    if rng.random() < 0.7:
        decodes = rng.randrange(1, 33)
        work = StepWork(num_decodes=decodes, decode_context=decodes * rng.randrange(10, 3000), num_samples=decodes)
    if rng.random() < 0.6 or not work.num_decodes:
        work = work.with_prefill(rng.randrange(0, 4000), rng.randrange(1, 600), rng.random() < 0.5)
    return work


def taken(work: StepWork) -> float:
    return FittedCostModel(TRUE).step_seconds(work)


@given(seen=st.lists(st.tuples(WORK, SECONDS), max_size=30), work=WORK, more=WORK)
def test_predictions_keep_their_promises_whatever_is_observed(
    seen: list[tuple[StepWork, float]], work: StepWork, more: StepWork
) -> None:
    model = FittedCostModel(TRUE)
    for each, seconds in seen:
        model.observe(each, seconds)
    grown = StepWork(*(a + b for a, b in zip(work, more, strict=True)))
    assert 0 <= model.step_seconds(work) <= model.step_seconds(grown) * (1 + 1e-9) < math.inf
    assert 0 == model.prefill_seconds(5, 0) <= model.prefill_seconds(5, 1) <= model.prefill_seconds(5, 40) < math.inf


def test_it_learns_what_work_costs() -> None:
    rng = random.Random(1)
    guess = Coefficients(*(value * rng.uniform(0.4, 2.5) for value in TRUE.values()))
    model = FittedCostModel(guess)
    for _ in range(600):
        work = some_work(rng)
        model.observe(work, taken(work) * rng.lognormvariate(0, 0.03))
    errors = sorted(abs(model.step_seconds(work) / taken(work) - 1) for work in (some_work(rng) for _ in range(200)))
    assert errors[100] < 0.06
    assert errors[180] < 0.15


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_machine_that_changes_its_speed_is_followed_within_twenty_steps(factor: float) -> None:
    rng = random.Random(2)
    model = FittedCostModel(TRUE, doubt=0.1)
    for index in range(60):
        work = some_work(rng)
        model.observe(work, taken(work) * (factor if index >= 40 else 1))
    assert model.step_seconds(some_work(rng)) > 0
    work = some_work(rng)
    assert model.step_seconds(work) / taken(work) == pytest.approx(factor, rel=0.15)


@pytest.mark.parametrize("odd", [1e-9, 1e3, 1e9])
def test_one_odd_step_moves_nothing(odd: float) -> None:
    rng = random.Random(3)
    model = FittedCostModel(TRUE, doubt=0.1)
    for _ in range(10):
        work = some_work(rng)
        model.observe(work, taken(work))
    model.observe(some_work(rng), odd)
    work = some_work(rng)
    assert model.step_seconds(work) / taken(work) == pytest.approx(1, rel=0.01)


def test_a_fit_finds_the_coefficients_despite_odd_steps() -> None:
    rng = random.Random(4)
    seen = [(work, taken(work)) for work in (some_work(rng) for _ in range(200))]
    assert fit(seen).values() == pytest.approx(TRUE.values(), rel=0.01)
    odd = [(work, seconds * 5) for work, seconds in seen[:4]]
    found = fit_robustly([*odd, *seen[4:]])
    assert max(abs(relative_error(found, *each)) for each in seen) < 0.1
    assert scaled(TRUE, 2.0).row == 2 * TRUE.row
    with pytest.raises(ValueError, match="no step"):
        fit([])


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_coefficient_that_means_nothing_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="row is"):
        Coefficients(0, value, 0, 0, 0, 0)


KEY = CostKey("model", "cpu", "float32", 16, 2)


def test_what_was_learned_is_there_the_next_time(tmp_path: Path) -> None:
    store = CostStore(tmp_path / "costs")
    first = KeptCostModel(TRUE, store, KEY)
    assert not first.was_known
    first.save()
    assert store.load(KEY) is None, "nothing was learned"
    for _ in range(20):
        work = some_work(random.Random(5))
        first.observe(work, 2 * taken(work))
    first.save()
    second = KeptCostModel(TRUE, store, KEY)
    assert second.was_known
    assert second.coefficients == first.coefficients
    assert store.load(CostKey("model", "cpu", "float32", 16, 3)) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 1}', b"\xff"])
def test_a_damaged_file_is_left_out_with_a_warning(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / KEY.filename).write_bytes(content)
    assert CostStore(tmp_path).load(KEY) is None
    assert KEY.filename in caplog.text


def test_another_version_is_left_out(tmp_path: Path) -> None:
    store = CostStore(tmp_path)
    assert store.save(KEY, TRUE)
    path = tmp_path / KEY.filename
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 0}))
    assert store.load(KEY) is None


def test_what_was_kept_last_for_a_model_is_found_whatever_the_settings(tmp_path: Path) -> None:
    store = CostStore(tmp_path / "costs")
    assert store.latest("a model") is None
    kept = [Coefficients(*(factor * value for value in TRUE.values())) for factor in (1, 2, 3)]
    for age, (model, threads, costs) in enumerate(
        [
            ("another 7", 1, kept[2]),
            ("a model 97", 2, kept[1]),
            ("a model 97", 1, kept[0]),
            ("a model 9 97", 1, kept[2]),
        ]
    ):
        key = CostKey(model, "cpu", "float32", 16, threads)
        assert store.save(key, costs)
        os.utime(store.path(key), (1_000_000 - age, 1_000_000 - age))
    for name, content in (("x.json", b"{"), ("y.json", b'{"version": 1, "key": []}'), ("z.json", b"[]")):
        (tmp_path / "costs" / name).write_bytes(content)
    assert store.latest("a model") == kept[1]
    assert store.latest("model") is None


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not CostStore(tmp_path / "file" / "costs").save(KEY, TRUE)


def error_after(seconds: float, rng: random.Random, model: FittedCostModel, slowness: float) -> float:
    """Let steps run for so long on a machine that is so much slower; the median error of the last predictions.

    None of them takes longer than 200 ms on the machine as it was.
    """
    errors = []
    while seconds > 0:
        work = some_work(rng)
        if taken(work) > 0.2:
            continue
        took = taken(work) * slowness * rng.lognormvariate(0, 0.03)
        errors.append(abs(model.step_seconds(work) / took - 1))
        model.observe(work, took)
        seconds -= took
    return sorted(errors[-8:])[4]


@pytest.mark.parametrize("slowness", [0.5, 1.7, 3.0])
def test_another_process_that_takes_the_cores_is_followed_within_seconds_and_so_is_its_end(slowness: float) -> None:
    rng = random.Random(6)
    model = FittedCostModel(TRUE, doubt=0.1)
    assert error_after(10, rng, model, 1.0) < 0.1
    assert error_after(3 * max(slowness, 1), rng, model, slowness) < 0.1
    assert error_after(3, rng, model, 1.0) < 0.1


@pytest.mark.parametrize("stepped", [3600.0, -3600.0, math.nan, math.inf, 0.0, 1e-7])
def test_clock_steps_and_suspended_processes_do_not_poison_it(stepped: float) -> None:
    """Every tenth step is measured wrongly: an hour too long (suspended), or the clock was set back meanwhile."""
    rng = random.Random(7)
    model, clean = FittedCostModel(TRUE, doubt=0.1), FittedCostModel(TRUE, doubt=0.1)
    worst = 0.0
    for index in range(300):
        work = some_work(rng)
        took = taken(work) * rng.lognormvariate(0, 0.03)
        if index % 10 == 9:
            model.observe(work, stepped)
        else:
            model.observe(work, took)
            clean.observe(work, took)
        worst = max(worst, abs(model.step_seconds(work) / clean.step_seconds(work) - 1))
    assert worst < 0.06


def test_two_odd_steps_in_a_row_move_nothing() -> None:
    rng = random.Random(8)
    model = FittedCostModel(TRUE, doubt=0.1)
    for index in range(40):
        work = some_work(rng)
        model.observe(work, 1000.0 if index in (20, 21) else taken(work))
    assert model.step_seconds(work) == pytest.approx(taken(work), rel=0.01)


def test_what_was_fitted_is_believed_and_kept(tmp_path: Path) -> None:
    store = CostStore(tmp_path / "costs")
    model = KeptCostModel(TRUE, store, KEY)
    assert model.path.parent == tmp_path / "costs"
    assert not model.save(), "there is nothing to keep yet"
    fitted = Coefficients(step=0.01, row=1e-3, few_rows=0.0, prefill_context=0.0, decode_context=1e-6, sample=1e-4)
    model.take_over(fitted)
    assert model.save()
    kept = store.load(KEY)
    assert kept is not None
    assert (kept.step, kept.row, kept.sample) == (fitted.step, fitted.row, fitted.sample)
    assert kept.few_rows == TRUE.few_rows / 10, "nothing is for free"
