"""A lint report for the eye. Reads a report, computes nothing that `--json` does not hold."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from headstart.prompt.divergence import Divergence
from headstart.prompt.lint import Breaker, LintReport

_MAX_SHOWN = 20
_LEAD, _VALUE = 20, 36  # characters shown before and of what differs; a UUID is shown whole


def print_lint(report: LintReport, name: str, measured_by: str, num_broken: int, console: Console) -> None:
    """What the file came to, the breakers by their cost, and for each what to do; 80 columns are enough."""
    share = report.cached_tokens / max(1, report.prompt_tokens)
    console.print(
        f"[bold]{escape(name)}[/]  {report.requests:,} requests, {report.prompt_tokens:,} prompt tokens, "
        f"{share:.1%} of them cached",
        highlight=False,
    )
    if num_broken:
        lines = "1 line is" if num_broken == 1 else f"{num_broken:,} lines are"
        console.print(f"[yellow]{lines} left out, as said above[/]", highlight=False)
    console.print(f"[dim]{escape(measured_by)}[/]", highlight=False)
    if not report.breakers:
        console.print("[green]No cache breaker found.[/]")
        return
    possible = (report.cached_tokens + report.lost_tokens) / max(1, report.prompt_tokens)
    console.print()
    console.print(_table(report))
    for number, breaker in enumerate(report.breakers[:_MAX_SHOWN], 1):
        _print_details(number, breaker, console)
    if len(report.breakers) > _MAX_SHOWN:
        console.print(f"and {len(report.breakers) - _MAX_SHOWN} smaller ones (--json has all)")
    console.print(f"Without them [bold]{min(1.0, possible):.1%}[/] would be cached.", highlight=False)


def _table(report: LintReport) -> Table:
    with_money = report.lost_money is not None
    table = Table(title="Cache breakers", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("what differs", style="cyan")
    table.add_column("where")
    for column in ("requests", "tokens", "ms", *(["money"] if with_money else [])):
        table.add_column(column, justify="right", no_wrap=True)
    for number, breaker in enumerate(report.breakers[:_MAX_SHOWN], 1):
        found = breaker.divergence
        cost = _cost(breaker.requests, breaker.tokens, breaker.seconds, breaker.money)
        table.add_row(str(number), found.kind.value, _plain(found.label), *cost)
    table.add_section()
    requests = sum(breaker.requests for breaker in report.breakers)
    table.add_row("", "all", "", *_cost(requests, report.lost_tokens, report.lost_seconds, report.lost_money))
    return table


def _cost(requests: int, tokens: int, seconds: float, money: float | None) -> list[str]:
    cells = [f"{requests:,}", f"{tokens:,}", f"{seconds * 1000:,.0f}"]
    return cells if money is None else [*cells, f"{money:,.4f}"]


def _print_details(number: int, breaker: Breaker, console: Console) -> None:
    found = breaker.divergence
    first, second = breaker.lines
    where = f"{_plain(found.label)}, first in line {second} (against {first})"
    console.print(f"[bold]{number}[/]  [cyan]{found.kind.value}[/] in {where}", highlight=False)
    if found.old_value or found.new_value:
        console.print(Padding(_plain(example(found)), (0, 0, 0, 3)), highlight=False)
    console.print(Padding(f"[green]→[/] {_plain(found.advice)}", (0, 0, 0, 3)), highlight=False)
    console.print()


def example(found: Divergence) -> str:
    """`after “…Now: ” was “12:01”, is “12:02”`."""
    lead = f"after “…{found.lead[-_LEAD:]}” " if found.lead else "at its beginning "
    return f"{lead}was {_quoted(found.old_value)}, is {_quoted(found.new_value)}"


def _quoted(text: str) -> str:
    return f"“{text if len(text) <= _VALUE else text[: _VALUE - 1] + '…'}”"


def _plain(text: str) -> str:
    """Text of a request as the terminal may show it: no markup, no control characters."""
    return escape("".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text))
