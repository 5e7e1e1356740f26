"""What every benchmark script shares: its table, PASS or FAIL against bars, the machine, JSON, and how it ends."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from headstart.bench.http import TransferError
from headstart.bench.options import BenchError
from headstart.cli.client import ServerError
from headstart.executor.base import StartupError
from headstart.hub import ModelError

CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Bar:
    """A demand on one number. `at_most`: it may not exceed `limit`; otherwise it may not be below. NaN is a miss."""

    name: str
    value: float
    limit: float
    at_most: bool

    @property
    def passed(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        verdict = "[green]PASS[/]" if self.passed else "[red]FAIL[/]"
        return f"{verdict}  {self.name}: {self.value:.4g} (must be {'<=' if self.at_most else '>='} {self.limit:g})"


def machine() -> dict[str, str | int]:
    """What the numbers were measured on. `load`: runnable threads of the last minute, before this run's own work."""
    found: dict[str, str | int] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": f"{_LOAD_AT_START:.1f}",
    }
    for package in ("torch", "headstart"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source tree that is not installed
            continue
    return found


def machine_line() -> str:
    return "  ".join(f"{name} {value}" for name, value in machine().items())


def _cpu_name() -> str:
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


_LOAD_AT_START = os.getloadavg()[0]


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], bars: Sequence[Bar]) -> None:
    """The machine, the table, then one line a bar."""
    console = Console()
    console.print(machine_line(), highlight=False, soft_wrap=True)
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        # A heading may break, a number not.
        table.add_column(
            column, justify="right" if index else "left", min_width=max((len(row[index]) for row in rows), default=0)
        )
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for bar in bars:
        console.print(str(bar), highlight=False, soft_wrap=True)


def finish(path: Path | None, results: Mapping[str, Any], bars: Sequence[Bar]) -> int:
    """Write the JSON file if there is a path. The exit code: 1 if a bar is missed."""
    passed = all(bar.passed for bar in bars)
    if path is not None:
        named = [asdict(bar) | {"passed": bar.passed} for bar in bars]
        written = {"machine": machine(), "results": results, "bars": named, "passed": passed}
        path.write_text(json.dumps(written, indent=1) + "\n")
    return 0 if passed else 1


def run_main(main: Callable[[], int]) -> int:
    """`main` with a script's manners: one line for what it cannot do (exit code 1), quiet at Ctrl-C (130)."""
    try:
        return main()
    except (BenchError, ModelError, ServerError, StartupError, TransferError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
