"""Runs the measurement of the kernels in a process of its own, which may load torch, and reads what it says.

Must not import what it measures: the command stays light, and no thread of it stands beside those that are timed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import msgspec

import headstart
from headstart.bench.kernel_report import KernelFailure, KernelMessage, KernelReport
from headstart.bench.options import BenchError

_MODULE = "headstart.kernel_bench"


def run_kernels(model: str, threads: int | None, on_progress: Callable[[int, int], None] | None = None) -> KernelReport:
    """Measure; takes a minute at most. model: as `headstart serve` takes it. Raises `BenchError`."""
    command = [sys.executable, "-P", "-m", _MODULE, model, str(threads or 0)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=_environment()) as process:
        assert process.stdout is not None
        report = None
        try:
            for line in process.stdout:
                message = msgspec.json.decode(line, type=KernelMessage)
                if isinstance(message, KernelFailure):
                    raise BenchError(message.message)
                elif isinstance(message, KernelReport):
                    report = message
                elif on_progress is not None:
                    on_progress(message.done, message.total)
        except BaseException:
            process.kill()
            raise
    if report is None or process.returncode != 0:
        raise BenchError(
            f"the process that measures ended with exit code {process.returncode}; see its last lines above"
        )
    return report


def write_kernel_report(report: KernelReport, path: Path) -> None:
    """Raises `BenchError` for a place that cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}") from None


def _environment() -> dict[str, str]:
    """This process' environment, with this very package importable (a checkout that nobody installed)."""
    environment = dict(os.environ)
    root = str(Path(headstart.__file__).resolve().parents[1])
    if root != sysconfig.get_path("purelib"):
        present = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = root if not present else f"{root}{os.pathsep}{present}"
    return environment
