"""A lint report for the eye: rich tables. Reads a report, computes nothing that `--json` does not hold."""

from __future__ import annotations

import json

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from headstart.prompt.lint import Breaker, LintReport, Prices, title_of

MAX_SHOWN = 20
_LINES_SHOWN = 5
_CONTEXT = 28  # characters


def print_lint(report: LintReport, name: str, prices: Prices | None, console: Console) -> None:
    """What the file came to, the breakers by their cost, and for each what to do."""
    share = report.cached_tokens / max(1, report.prompt_tokens)
    console.print(
        f"[bold]{escape(name)}[/]  {report.num_requests:,} requests, {report.prompt_tokens:,} prompt tokens, "
        f"{share:.1%} of them cached",
        highlight=False,
    )
    if not report.breakers:
        console.print("[green]No cache breaker found.[/]")
        return
    shown = report.breakers[:MAX_SHOWN]
    console.print(_table(shown, prices))
    for number, breaker in enumerate(shown, 1):
        _print_details(number, breaker, console)
    if len(report.breakers) > MAX_SHOWN:
        console.print(f"and {len(report.breakers) - MAX_SHOWN} smaller ones (--json has all)")


def _table(breakers: tuple[Breaker, ...], prices: Prices | None) -> Table:
    table = Table(title="Cache breakers", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("what differs")
    for column in ("requests", "tokens", "ms", *(["money"] if prices is not None else [])):
        table.add_column(column, justify="right", no_wrap=True)
    for number, breaker in enumerate(breakers, 1):
        money = [f"{prices.of_waste(breaker.wasted_tokens):,.4f}"] if prices is not None else []
        cost = [f"{breaker.count:,}", f"{breaker.wasted_tokens:,}", f"{breaker.wasted_seconds * 1000:,.0f}", *money]
        table.add_row(str(number), title_of(breaker), *cost)
    return table


def _print_details(number: int, breaker: Breaker, console: Console) -> None:
    example = breaker.example
    lines = ", ".join(map(str, breaker.lines[:_LINES_SHOWN])) + (", …" if breaker.count > _LINES_SHOWN else "")
    console.print(f"[bold]{number}[/]  [cyan]{title_of(breaker)}[/], lines {lines}", highlight=False)
    told = [example.detail] if example.detail else []
    if example.old or example.new:
        before = _quoted(example.before[-_CONTEXT:])
        told.append(f"after {before}: was {_quoted(example.old[:_CONTEXT])}, is {_quoted(example.new[:_CONTEXT])}")
    for text in told:
        console.print(Padding(escape(text), (0, 0, 0, 3)), highlight=False)
    console.print(Padding(f"[green]→[/] {escape(example.advice)}", (0, 0, 0, 3)), highlight=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
