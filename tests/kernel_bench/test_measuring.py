"""The measuring process' own parts: rounds, cache sizes, cases that do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headstart.kernel_bench.caches import CacheSizes, cache_sizes
from headstart.kernel_bench.timing import time_in_turn

native = pytest.importorskip("headstart._native")

from headstart.kernel_bench.linear import made_up, mix_of  # noqa: E402
from headstart.kernel_bench.peaks import peak_cases  # noqa: E402
from headstart.ops import QuantizedWeight, WeightFormat  # noqa: E402
from headstart.ops.native_ops import NativeOps  # noqa: E402


class Clock:
    """A clock that cases move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def case(self, *seconds: float) -> object:
        """A call that takes so long, the first number first; the last one from then on."""
        upcoming = list(seconds)

        def run() -> None:
            self.now += upcoming.pop(0) if len(upcoming) > 1 else upcoming[0]

        return run


def test_rounds_take_all_cases_in_turn() -> None:
    clock = Clock()
    cases = [clock.case(9.0, 2.0, 4.0), clock.case(9.0, 0.25)]
    ended: list[float] = []
    timings = time_in_turn(cases, lambda: ended.append(clock.now), budget_s=99, rounds=3, slice_s=1.0, clock=clock)
    assert ended == [20.0, 21.0, 25.0, 26.0, 30.0, 31.0]  # the first calls, 18 s, count for nothing
    assert (timings.best(0), timings.median(0)) == (2.0, 4.0)
    assert timings.best(1) == timings.after(1).best(0) == 0.25


def test_a_used_up_budget_ends_the_rounds() -> None:
    clock = Clock()
    timings = time_in_turn([clock.case(10.0)], lambda: None, budget_s=15, rounds=5, slice_s=1.0, clock=clock)
    assert timings.num_rounds() == 1


def cpu(folder: Path, number: int, shared: str) -> None:
    for index, (level, size, who) in enumerate((("1", "32K", ""), ("2", "512K", str(number)), ("3", "16M", shared))):
        cache = folder / f"cpu{number}" / "cache" / f"index{index}"
        cache.mkdir(parents=True)
        for name, text in (("level", level), ("size", size), ("shared_cpu_list", who)):
            (cache / name).write_text(text + "\n")


def test_caches_that_are_shared_count_once(tmp_path: Path) -> None:
    for number in range(4):
        cpu(tmp_path, number, "0-1" if number < 2 else "2-3")
    assert cache_sizes(tmp_path, range(2)) == CacheSizes(l2=512 << 10, last=16 << 20)
    assert cache_sizes(tmp_path, range(4)) == CacheSizes(l2=512 << 10, last=32 << 20)
    assert cache_sizes(tmp_path / "none", range(4)).last > 0


@pytest.mark.parametrize("name", native.instruction_sets())
def test_more_rounds_are_more_work(name: str) -> None:
    runtime = native.Runtime(2, [], name)
    for mix in (native.Mix.FLOAT32, native.Mix.INT8, native.Mix.INT4):
        few, many = (native.multiply_most(runtime, mix, 4, rounds) for rounds in (80, 160))
        assert many == 2 * few > 0


def test_reading_stays_inside_of_its_slices() -> None:
    memory = torch.ones(4096, dtype=torch.uint8)
    for streams in (1, 4):
        native.read_most(native.Runtime(2), memory.data_ptr(), 1024, 4, 2, streams)


def test_peaks_of_every_set_and_level() -> None:
    cases = peak_cases(2, CacheSizes(l2=1 << 16, last=1 << 18))
    timings = time_in_turn(cases.all(), lambda: None, budget_s=0, rounds=1, slice_s=0.0)
    compute, read = cases.results(timings, 2)
    fast = [name for name in native.instruction_sets() if name != "portable"] or ["portable"]
    assert [(peak.instruction_set, peak.mix) for peak in compute] == [
        (name, mix) for name in fast for mix in ("float32", "int8", "int4")
    ]
    assert [peak.level for peak in read] == ["L2", "L3", "DRAM"]
    assert all(peak.one_thread > 0 and peak.all_threads > 0 for peak in (*compute, *read))


@pytest.mark.parametrize("kind", [kind for kind in WeightFormat if kind is not WeightFormat.BFLOAT16])
def test_made_up_matrices_are_in_their_format_and_finite(kind: WeightFormat) -> None:
    matrix = made_up(kind, 24, 40)
    assert (matrix.format if isinstance(matrix, QuantizedWeight) else WeightFormat.FLOAT32) is kind
    out = NativeOps(1).add_linear(NativeOps(1).pack(matrix), None)(torch.ones(2, 40), torch.zeros(2, 24))
    assert bool(out.isfinite().all())


def test_formats_are_multiplied_as_the_kernels_do() -> None:
    assert mix_of(WeightFormat.Q8_0) == "int8"
    assert mix_of(WeightFormat.Q4_0) == mix_of(WeightFormat.Q4_1) == "int4"
    assert mix_of(WeightFormat.FP8) == mix_of(WeightFormat.BFLOAT16) == "float32"
