"""A report for the eye: rich tables. Reads a report, computes nothing that `--json` does not hold."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headstart.bench.ledger import PARTS, LedgerCheck
from headstart.bench.report import Ratio, Report
from headstart.bench.stats import GroupSummary, Quantiles

MAX_ERRORS_SHOWN = 5
LEAST_SHOWN_MS = 0.005


def print_report(report: Report, console: Console) -> None:
    """The whole report: targets, latencies, rates, ledger parts, figures, ratios, the ledger check, errors."""
    for target in report.targets:
        console.print(f"[bold]{target.name}[/]  {target.url}  model {target.model}", highlight=False)
    if report.interrupted:
        console.print("[yellow]Interrupted: this is what was measured until then.[/]")
    if not report.records:
        console.print("[yellow]No request was sent.[/]")
        return
    several = len(report.targets) > 1
    console.print(_latencies(report.groups, several))
    console.print(_rates(report.groups, several))
    if any(summary.prediction_error for summary in report.groups):
        console.print(_predictions(report.groups, several))
    if any(summary.ledger for summary in report.groups):
        console.print(_ledger_parts(report.groups, several))
    if any(report.figures.values()):
        console.print(_figures(report))
    if any(report.chunks.values()):
        console.print(_chunks(report))
    if report.ratios:
        console.print(_ratios(report.ratios))
    for name, check in (report.ledger or {}).items():
        console.print(_check_line(name if several else "", check), highlight=False)
    for note in report.notes:
        console.print(f"[yellow]Note:[/] {note}", highlight=False)
    _print_errors(report, console)


def number(value: float | None) -> str:
    """Three significant digits where they matter, none invented: 0.42, 4.2, 42.1, 421, 4,210."""
    if value is None:
        return "-"
    size = abs(value)
    return f"{value:.2f}" if size < 10 else f"{value:.1f}" if size < 100 else f"{value:,.0f}"


def _table(title: str, columns: Iterable[str], several: bool, *, lead: Iterable[str] = ("group",)) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ["", *lead] if several else lead:
        table.add_column(name, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _name(summary: GroupSummary, several: bool) -> list[str]:
    return [summary.target, summary.group] if several else [summary.group]


def _latencies(groups: Iterable[GroupSummary], several: bool) -> Table:
    table = _table("Latency, ms", ("p50", "p90", "p99"), several, lead=("group", ""))
    for summary in groups:
        name = _name(summary, several)
        times: dict[str, Quantiles | None] = {
            "TTFT": summary.ttft, "TPOT": summary.tpot, "ITL": summary.itl, "largest gap": summary.max_gap,
            "E2E": summary.e2e, "rejection": summary.rejection,
        }  # fmt: skip
        for label, quantiles in times.items():
            if quantiles is not None:
                table.add_row(*name, label, *(number(v) for v in (quantiles.p50, quantiles.p90, quantiles.p99)))
                name = [""] * len(name)
    return table


def _predictions(groups: Iterable[GroupSummary], several: bool) -> Table:
    table = _table("The server's predictions of the TTFT, off by", ("p50", "p90", "p99"), several)
    for summary in groups:
        if (error := summary.prediction_error) is not None:
            table.add_row(*_name(summary, several), *map(_share, (error.p50, error.p90, error.p99)))
    return table


def _rates(groups: Iterable[GroupSummary], several: bool) -> Table:
    groups = list(groups)
    with_slo = any(summary.goodput is not None for summary in groups)
    with_rejected = any(summary.rejected for summary in groups)
    columns = ["ok", *(["rejected"] if with_rejected else []), "errors", "hit rate", "tok/s in", "tok/s out", "req/s"]
    of_slo = ["good/s", "SLO met", *(["of accepted"] if with_rejected else [])]
    table = _table("Requests", columns + (of_slo if with_slo else []), several)
    for summary in groups:
        cells = [
            f"{summary.ok + summary.stopped}/{summary.requests}",
            *([str(summary.rejected)] if with_rejected else []),
            f"[red]{summary.errors}[/]" if summary.errors else "0",
            _share(summary.hit_rate),
            number(summary.prompt_tokens_per_s),
            number(summary.output_tokens_per_s),
            number(summary.qps),
        ]
        if with_slo:
            cells += [number(summary.goodput), _share(summary.slo_met)]
            cells += [_share(summary.slo_met_accepted)] if with_rejected else []
        table.add_row(*_name(summary, several), *cells)
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _ledger_parts(groups: Iterable[GroupSummary], several: bool) -> Table:
    """A row a part, since there are ten of them; parts that took no time anywhere are left out."""
    known = [summary for summary in groups if summary.ledger]
    columns = [" ".join(_name(summary, several)) for summary in known]
    table = _table("The server's ledger of the TTFT, mean ms", columns, False, lead=("part",))
    for part in PARTS:
        values = [(summary.ledger or {}).get(part, 0.0) for summary in known]
        if any(value >= LEAST_SHOWN_MS for value in values):
            table.add_row(part, *map(number, values))
    table.add_row("sum", *(number(sum((summary.ledger or {}).values())) for summary in known))
    return table


def _figures(report: Report) -> Table:
    names = dict.fromkeys(name for figures in report.figures.values() for name in figures)
    targets = [target.name for target in report.targets]
    table = _table(f"Figures of {report.workload}", targets if len(targets) > 1 else ("",), False, lead=("",))
    for name in names:
        table.add_row(name.replace("_", " "), *(number(report.figures[target].get(name)) for target in targets))
    return table


def _chunks(report: Report) -> Table:
    """A row a class of sizes: how many steps each target computed of it."""
    names = [target.name for target in report.targets]
    classes = sorted(
        {(each.above, each.up_to) for chunks in report.chunks.values() for each in chunks}, key=itemgetter(0)
    )
    counts = {name: {(each.above, each.up_to): each.steps for each in report.chunks[name]} for name in names}
    table = _table("Prompt tokens a step", names if len(names) > 1 else ("steps",), False, lead=("tokens",))
    for above, up_to in classes:
        label = f"over {above:,}" if up_to is None else f"{above + 1:,}-{up_to:,}"
        table.add_row(label, *(f"{counts[name].get((above, up_to), 0):,}" for name in names))
    return table


def _ratios(ratios: Iterable[Ratio]) -> Table:
    table = _table("A against B", ("A", "B", "A / B"), False, lead=("group", "metric"))
    for ratio in ratios:
        table.add_row(
            ratio.group, ratio.metric.replace("_", " "), number(ratio.first), number(ratio.second), number(ratio.ratio)
        )
    return table


def _check_line(name: str, check: LedgerCheck) -> str:
    verdict = "[green]PASS[/]" if check.passed else "[red]FAIL[/]"
    if not check.checked:
        return f"Ledger check {name} {verdict}: no answer carried a ledger (Server-Timing or usage.ttft_ledger)"
    return (
        f"Ledger check {name} {verdict}: client minus server median {number(check.median_ms)} ms, "
        f"largest {number(check.max_ms)} ms over {check.checked} requests; "
        f"{check.outside} beyond 3 ms and 2 %, {check.missing} without a ledger"
    )


def _print_errors(report: Report, console: Console) -> None:
    counts: dict[str, int] = {}
    for record in report.records:
        if record.failed:
            text = f"{record.target} {record.group}: {record.error}"
            counts[text] = counts.get(text, 0) + 1
    for text, count in sorted(counts.items(), key=lambda item: -item[1])[:MAX_ERRORS_SHOWN]:
        console.print(f"[red]{count} x[/] {escape(text)}", highlight=False)
    if len(counts) > MAX_ERRORS_SHOWN:
        console.print(f"[red]and {len(counts) - MAX_ERRORS_SHOWN} other errors[/] (--json has all)")
    late = max((summary.late_max_ms for summary in report.groups), default=0.0)
    if late > 50:
        console.print(f"[yellow]Note:[/] requests left up to {late:.0f} ms late: the client could not keep up")
