from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from headstart.cli.client import Answer
from headstart.cli.progress import TerminalProgress
from headstart.cli.show import ledger_table, one_line


def answer(*, num_output_tokens: int = 4) -> Answer:
    return Answer(
        text="Hello",
        ttft=0.100,
        total=0.160,
        timing=(("queue", 0.010), ("prefill", 0.080)),
        num_prompt_tokens=40,
        num_cached_tokens=32,
        num_output_tokens=num_output_tokens,
        finish_reason="stop",
    )


def shown_by(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_one_line() -> None:
    assert one_line(answer()) == "TTFT 100 ms · 32 of 40 prompt tokens cached · 4 tokens, 20.0 ms each"
    assert "each" not in one_line(answer(num_output_tokens=1))


def test_the_parts_in_the_table_sum_to_the_ttft() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(ledger_table(answer(), "Title"))
    numbers = {
        line.split("  ")[0]: float(found[0])
        for line in shown_by(console).splitlines()
        if (found := re.findall(r"\d+\.\d", line))
    }
    ttft = numbers.pop("TTFT")
    assert ttft == 100.0
    assert numbers.keys() == {"queue", "prefill", "client and network"}
    assert sum(numbers.values()) == pytest.approx(ttft)


def test_progress_draws_nothing_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO())
    with TerminalProgress(console) as progress:
        progress("download", 1, 2)
    assert shown_by(console).strip() == ""


def test_progress_shows_one_bar_a_stage() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with TerminalProgress(console) as progress:
        progress("download", 1 << 20, 2 << 20)
        progress("download", 2 << 20, 2 << 20)
        progress("warm-up", 3, 8)
        progress("load weights", 0, None)
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown_by(console)).strip().splitlines()[-3:]
    assert re.search(r"✓.* download .*2\.0/2\.0 MiB", last[0])
    assert re.search(r"warm-up .*3/8 steps", last[1]), "steps are no bytes"
    assert "load weights" in last[2]
