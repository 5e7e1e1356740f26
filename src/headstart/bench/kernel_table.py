"""A kernel report for the eye: rich tables. Computes nothing."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from headstart.bench.kernel_report import KernelReport, Mix

_MIXES: dict[Mix, str] = {
    "float32": "float32 multiply-add",
    "int8": "8-bit codes x 8-bit",
    "int4": "4-bit codes x 8-bit",
}


def print_kernel_report(report: KernelReport, console: Console) -> None:
    """The machine, its peaks, then each operation with its share of its roofline."""
    console.print(
        f"[bold]{report.cpu}[/]  load {report.load:.1f}  headstart {report.version}  model {report.model}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(_peaks(report))
    console.print(_operations(report))
    console.print(
        "time: the best of the rounds' medians. reached: of what holds the operation back, multiplying or reading "
        "memory. share: of the time that its peak allows. Weights, keys and values are in no cache when needed.",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def duration(seconds: float) -> str:
    """Three digits: 12.3 us, 4.56 ms, 1.23 s."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            value = seconds / size
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    raise AssertionError


def _table(title: str, lead: tuple[str, ...], columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in lead:
        table.add_column(name, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _peaks(report: KernelReport) -> Table:
    columns = ("1 thread", *((f"{report.threads} threads",) if report.threads > 1 else ()))
    table = _table("Peaks", ("", ""), (*columns, ""))

    def add(what: str, of: str, one: float, every: float, unit: str) -> None:
        table.add_row(what, of, f"{one:.1f}", *((f"{every:.1f}",) if report.threads > 1 else ()), unit)

    for peak in report.compute_peaks:
        add(peak.instruction_set, _MIXES[peak.mix], peak.one_thread, peak.all_threads, "GOP/s")
    for read in report.read_peaks:
        add("read", read.level, read.one_thread, read.all_threads, "GB/s")
    return table


def _operations(report: KernelReport) -> Table:
    title = f"Operations, {report.threads} threads, {report.instruction_set}"
    table = _table(title, ("operation", "format"), ("rows", "context", "time", "reached", "share"))
    before = ""
    for each in report.operations:
        if before not in ("", each.name):
            table.add_section()
        before = each.name
        table.add_row(
            each.name,
            each.format,
            str(each.rows),
            "" if each.context is None else f"{each.context:,}",
            duration(each.seconds),
            f"{each.gops:.0f} GOP/s" if each.bound == "compute" else f"{each.gigabytes_per_s:.1f} GB/s",
            f"{each.share:.0%}",
        )
    return table
