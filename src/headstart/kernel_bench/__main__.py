"""The process that measures: one JSON message a line on stdout (see `headstart.bench.kernel_report`)."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

from headstart.perf.openmp import spin_briefly

spin_briefly(os.environ)  # torch is imported below

import msgspec  # noqa: E402
import torch  # noqa: E402

import headstart  # noqa: E402
from headstart.bench.kernel_report import (  # noqa: E402
    KernelFailure,
    KernelMessage,
    KernelProgress,
    KernelReport,
    Operation,
    roofline,
)
from headstart.hub import ModelError, resolve  # noqa: E402
from headstart.ops import has_native_kernels  # noqa: E402
from headstart.perf.checkpoint import read_checked_spec  # noqa: E402
from headstart.worker.threads import usable_cores  # noqa: E402

BUDGET_S = 45.0
NOT_BUILT = (
    "the native kernels are not built, so there is nothing to measure: "
    "install g++ or clang and reinstall headstart (pip install --force-reinstall --no-deps)"
)


def say(message: KernelMessage) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


@torch.inference_mode()
def measure(model: str, threads: int) -> KernelReport:
    """Raises `ModelError`."""
    from headstart.kernel_bench.attention import attention_cases  # these need the compiled module
    from headstart.kernel_bench.caches import cache_sizes
    from headstart.kernel_bench.linear import linear_cases, matrix_formats
    from headstart.kernel_bench.peaks import peak_cases
    from headstart.kernel_bench.timing import ROUNDS, time_in_turn
    from headstart.ops.native_ops import NativeOps

    load, started_at = os.getloadavg()[0], datetime.now(UTC).isoformat(timespec="seconds")
    files = resolve(model, progress=None)
    spec = read_checked_spec(files)
    sizes = cache_sizes()
    ops = NativeOps(threads)
    torch.set_num_threads(1)  # torch's own would stand beside the kernels'
    cold_bytes = 2 * sizes.last
    peaks = peak_cases(threads, sizes)
    cases = [
        *linear_cases(ops, spec, matrix_formats(files, spec, ops), cold_bytes),
        *attention_cases(ops, spec, cold_bytes),
    ]
    calls = [*(case.run for case in cases), *peaks.all()]
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        say(KernelProgress(done, ROUNDS * len(calls)))

    timings = time_in_turn(calls, count, budget_s=BUDGET_S)
    compute, read = peaks.results(timings.after(len(cases)), threads)
    by_mix = {peak.mix: peak.all_threads for peak in compute if peak.instruction_set == ops.instruction_set}
    dram = next(peak.all_threads for peak in read if peak.level == "DRAM")
    operations = []
    for index, case in enumerate(cases):
        least, bound = roofline(case.work, case.num_bytes, by_mix, dram)
        operations.append(
            Operation(
                name=case.name,
                rows=case.rows,
                context=case.context,
                format=case.format,
                work=case.work,
                num_bytes=case.num_bytes,
                seconds=timings.best(index),
                median_seconds=timings.median(index),
                bound=bound,
                share=least / timings.best(index),
            )
        )
    return KernelReport(
        version=headstart.__version__, started_at=started_at, cpu=_cpu_name(), load=load, model=model, threads=threads,
        instruction_set=ops.instruction_set, rounds=timings.num_rounds(), compute_peaks=compute, read_peaks=read,
        operations=operations,
    )  # fmt: skip


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main(arguments: list[str]) -> int:
    model, threads = arguments
    if not has_native_kernels():
        say(KernelFailure(NOT_BUILT))
        return 1
    try:
        say(measure(model, int(threads) or usable_cores()))
    except ModelError as error:
        say(KernelFailure(str(error)))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
