"""What every benchmark script prints at its end: a small table, PASS or FAIL against a bar, and JSON if asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Bar:
    """A demand on one number. `at_most`: it may not exceed `limit`; otherwise it may not be below."""

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


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], bars: Sequence[Bar]) -> None:
    """The table, then one line a bar."""
    console = Console()
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for bar in bars:
        console.print(str(bar), highlight=False)


def finish(path: Path | None, results: dict[str, Any], bars: Sequence[Bar]) -> int:
    """Write the JSON file if there is a path. The exit code: 1 if a bar is missed."""
    passed = all(bar.passed for bar in bars)
    if path is not None:
        named = [asdict(bar) | {"passed": bar.passed} for bar in bars]
        path.write_text(json.dumps({"results": results, "bars": named, "passed": passed}, indent=1) + "\n")
    return 0 if passed else 1
