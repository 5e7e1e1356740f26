"""Cases that do what the machine can do at most: multiply in registers, read from a cache or from memory."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from headstart import _native as native
from headstart.bench.kernel_report import ComputePeak, Level, Mix, ReadPeak
from headstart.kernel_bench.caches import CacheSizes
from headstart.kernel_bench.timing import Timings

_MIXES: dict[Mix, native.Mix] = {
    "float32": native.Mix.FLOAT32,
    "int8": native.Mix.INT8,
    "int4": native.Mix.INT4,
}
_ITEMS_PER_THREAD = 4  # so that a thread that comes late takes fewer
_ROUNDS = 20_000  # tens of microseconds an item
_SLICE, _SLICES = 1 << 20, 16  # of memory that is read at once
_ALIGNMENT = 256
_MOST_READ = 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """A call, and how much it does: operations or bytes, in units of 10^9."""

    run: Callable[[], object]
    giga: float


@dataclass(slots=True)
class PeakCases:
    """Cases by what they measure; `first` says where in a list of timings they begin."""

    compute: dict[tuple[str, Mix, int], Case] = field(default_factory=dict)  # set, mix, threads
    read: dict[tuple[Level, int], list[Case]] = field(default_factory=dict)  # level, threads: ways of reading

    def all(self) -> list[Callable[[], object]]:
        return [case.run for case in self.compute.values()] + [case.run for ways in self.read.values() for case in ways]

    def results(self, timings: Timings, threads: int) -> tuple[list[ComputePeak], list[ReadPeak]]:
        """Peaks from the timings of `all()`."""
        speeds = {key: case.giga / timings.best(index) for index, (key, case) in enumerate(self.compute.items())}
        index = len(self.compute)
        reading: dict[tuple[Level, int], float] = {}
        for level_threads, ways in self.read.items():
            reading[level_threads] = max(way.giga / timings.best(index + i) for i, way in enumerate(ways))
            index += len(ways)
        compute = [
            ComputePeak(instruction_set=name, mix=mix, one_thread=speed, all_threads=speeds[name, mix, threads])
            for (name, mix, count), speed in speeds.items()
            if count == 1
        ]
        read = [
            ReadPeak(level=level, one_thread=speed, all_threads=reading[level, threads])
            for (level, count), speed in reading.items()
            if count == 1
        ]
        return compute, read


def peak_cases(threads: int, sizes: CacheSizes) -> PeakCases:
    """For 1 thread and for all, by every instruction set that may be used here."""
    found = PeakCases()
    names = native.instruction_sets()
    runtimes = {(name, count): native.Runtime(count, [], name) for name in names for count in {1, threads}}
    for name in names if len(names) == 1 else [name for name in names if name != "portable"]:
        for mix in _MIXES:
            for count in sorted({1, threads}):
                found.compute[name, mix, count] = _compute_case(runtimes[name, count], mix)
    memory = _memory(min(_MOST_READ, max(128 << 20, 4 * sizes.last)))
    for level in ("L2", "L3", "DRAM"):
        for count in sorted({1, threads}):
            found.read[level, count] = _read_cases(runtimes[names[0], count], memory, level, sizes)
    return found


def _compute_case(runtime: native.Runtime, mix: Mix) -> Case:
    items = _ITEMS_PER_THREAD * runtime.num_threads

    def run() -> float:
        return native.multiply_most(runtime, _MIXES[mix], items, _ROUNDS)

    return Case(run, 2 * run() / 1e9)  # a multiplication and an addition


def _read_cases(runtime: native.Runtime, memory: np.ndarray, level: Level, sizes: CacheSizes) -> list[Case]:
    """One stretch of memory at a time, and four side by side: which of them is faster differs by machine."""
    count = runtime.num_threads
    if level == "L2":
        slice_bytes, num_slices, repeats = sizes.l2 * 3 // 8, count, 50
    elif level == "L3":
        slice_bytes, num_slices, repeats = min(sizes.last, len(memory)) // 4 // count, count, 4
    else:
        slice_bytes, num_slices, repeats = _SLICE, _SLICES, 1
    slice_bytes = max(_ALIGNMENT, slice_bytes // _ALIGNMENT * _ALIGNMENT)
    at = memory.ctypes.data
    # From memory: a part that was not read for so long that no cache holds it, short enough not to be interrupted.
    step = slice_bytes * num_slices if level == "DRAM" else len(memory)
    parts = itertools.cycle(range(0, len(memory) - slice_bytes * num_slices + 1, step))

    def case(streams: int) -> Case:
        def run() -> np.ndarray:
            native.read_most(runtime, at + next(parts), slice_bytes, num_slices, repeats, streams)
            return memory  # kept as long as the case

        return Case(run, slice_bytes * num_slices * repeats / 1e9)

    return [case(1), case(4)]


def _memory(num_bytes: int) -> np.ndarray:
    """Pages that are really there, large ones if the system has them."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, dtype=np.uint8)
    memory.fill(1)
    return memory
