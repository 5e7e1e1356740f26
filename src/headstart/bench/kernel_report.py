"""What `headstart bench --kernels` finds, and how near to the machine's peaks it is. Arithmetic only; measures nothing.

Also the words in which the measuring process talks to the command: one JSON message a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

SCHEMA: Literal["headstart.bench.kernels/1"] = "headstart.bench.kernels/1"

Mix = Literal["float32", "int8", "int4"]  # which multiplications: floats, or codes with 8-bit activations
Level = Literal["L2", "L3", "DRAM"]


class ComputePeak(msgspec.Struct, kw_only=True):
    """Multiplications and additions in registers, GOP/s: the most that the instruction set does here."""

    instruction_set: str
    mix: Mix
    one_thread: float
    all_threads: float


class ReadPeak(msgspec.Struct, kw_only=True):
    """Bytes read, GB/s."""

    level: Level
    one_thread: float
    all_threads: float


class Work(msgspec.Struct):
    """So many multiplications and additions of one mix."""

    mix: Mix
    operations: float


class Operation(msgspec.Struct, kw_only=True):
    """One operation of a decoder at one size.

    `seconds`: of a call, the best round's median; `median_seconds`: over all rounds. `num_bytes`: what a call must read
    from memory, weights or keys and values; activations are left out. `context`: tokens, of attention.
    """

    name: str
    rows: int
    context: int | None
    format: str
    work: list[Work]
    num_bytes: float
    seconds: float
    median_seconds: float
    bound: Literal["compute", "memory"]
    share: float  # of the roofline: 1 is as fast as the machine can

    @property
    def gops(self) -> float:
        return sum(part.operations for part in self.work) / self.seconds / 1e9

    @property
    def gigabytes_per_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9


class KernelReport(msgspec.Struct, kw_only=True, tag="report"):
    """A whole run. Operations ran on `threads` threads, by `instruction_set`."""

    schema: Literal["headstart.bench.kernels/1"] = SCHEMA
    version: str
    started_at: str
    cpu: str
    load: float  # runnable threads on the machine in the minute before
    model: str
    threads: int
    instruction_set: str
    rounds: int
    compute_peaks: list[ComputePeak]
    read_peaks: list[ReadPeak]
    operations: list[Operation]


class KernelProgress(msgspec.Struct, tag="progress"):
    """So many of all measurements are done."""

    done: int
    total: int


class KernelFailure(msgspec.Struct, tag="failure"):
    """It cannot be measured. One line that says why and what to do."""

    message: str


KernelMessage = KernelReport | KernelProgress | KernelFailure


def roofline(
    work: Sequence[Work], num_bytes: float, peaks: dict[Mix, float], dram: float
) -> tuple[float, Literal["compute", "memory"]]:
    """The least seconds that a call can take, and what holds it back: multiplying, or reading from memory.

    peaks: GOP/s by mix; dram: GB/s. Both happen at the same time, so that the longer one counts.
    """
    computing = sum(part.operations / (peaks[part.mix] * 1e9) for part in work)
    reading = num_bytes / (dram * 1e9)
    return (computing, "compute") if computing >= reading else (reading, "memory")


def attended_pairs(rows: int, context: int) -> int:
    """Pairs of a query and a key that it sees, where the queries are the last `rows` of `context` tokens."""
    return rows * context - rows * (rows - 1) // 2
