"""How an answer's timing looks in the terminal: one line, or the whole ledger as a table."""

from __future__ import annotations

from rich.table import Table

from headstart.cli.client import Answer

_BAR_WIDTH = 30


def one_line(answer: Answer) -> str:
    """`TTFT 38 ms · 120 of 131 prompt tokens cached · 42 tokens, 14.1 ms each`."""
    cached = f"{answer.num_cached_tokens} of {answer.num_prompt_tokens} prompt tokens cached"
    pace = f", {answer.tpot * 1000:.1f} ms each" if answer.tpot is not None else ""
    return f"TTFT {answer.ttft * 1000:.0f} ms · {cached} · {answer.num_output_tokens} tokens{pace}"


def ledger_table(answer: Answer, title: str) -> Table:
    """Where the time to the first token went, part by part, with what the network and the client took as the rest."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("part")
    table.add_column("ms", justify="right")
    table.add_column("share of TTFT")
    parts = [(name, seconds) for name, seconds in answer.timing if name != "total"]
    rest = answer.ttft - sum(seconds for _, seconds in parts)
    for name, seconds in [*parts, ("client and network", max(rest, 0.0))]:
        bar = "█" * round(_BAR_WIDTH * seconds / answer.ttft)
        table.add_row(name, f"{seconds * 1000:.1f}", f"[cyan]{bar}[/] {seconds / answer.ttft:.0%}")
    table.add_section()
    table.add_row("[bold]TTFT", f"[bold]{answer.ttft * 1000:.1f}", "[bold]as the client sees it")
    return table
