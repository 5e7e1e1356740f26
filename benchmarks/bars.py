"""The project's bars on a running server, all in one run: PASS or FAIL each, and exit code 1 if one is missed.

Starts a server of its own with default settings (on a free port, stopped at the end) and takes in turn: `ledger`, 60
Poisson requests whose TTFT ledgers must sum to what the client saw; `hol`, short prompts behind a 6,000-token one with
a chat running; `prefix`, a warm prompt against a cold one; `leave`, 200 clients that leave (`client_leaves.py`).
The machine should do nothing else: client and server share its cores already.

    python benchmarks/bars.py
    python benchmarks/bars.py --only hol,prefix --kv-cache-memory 2GB
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _verdict import Bar, finish, run_main, show
from client_leaves import Leaving, Plan, parse_pair, shares, verdict

from headstart.bench import BenchOptions, Report, run
from headstart.bench.ledger import TOLERANCE_MS, TOLERANCE_SHARE
from headstart.bench.options import LengthDist
from headstart.cli.local_server import LocalServer
from headstart.config import DEFAULT_MODEL

HOL_BAR = 6.0  # a short prompt's TTFT behind a long one over its idle TTFT
GAP_BAR_MS = 1500.0  # of the chat that runs meanwhile
PREFIX_BAR = 0.2  # warm TTFT over cold TTFT


@dataclass(frozen=True, slots=True)
class Part:
    """One group of bars: table rows (what, value), the numbers for the file, and the bars."""

    rows: list[list[str]]
    results: dict[str, Any]
    bars: list[Bar]


@dataclass(frozen=True, slots=True)
class Where:
    """The server under test, and how large the loads are."""

    url: str
    api_key: str | None
    args: argparse.Namespace

    def report(self, **options: Any) -> Report:
        return run(BenchOptions(url=self.url, api_key=self.api_key, rounds=self.args.rounds, **options))


def ledger_part(where: Where) -> Part:
    args = where.args
    report = where.report(
        workload="poisson",
        requests=args.requests,
        rate=args.rate,
        prompt_tokens=LengthDist(min(32, args.short_tokens), 4 * args.short_tokens),
        check_ledger=True,
    )
    assert report.ledger is not None
    (check,) = report.ledger.values()
    rows = [
        ["ledger: requests compared", str(check.checked)],
        ["ledger: client minus server, median ms", _number(check.median_ms)],
        ["ledger: client minus server, largest ms", _number(check.max_ms)],
    ]
    tolerance = f"{TOLERANCE_MS:g} ms and {TOLERANCE_SHARE:.0%}"
    bars = [
        Bar("ledger: requests compared", check.checked, args.requests * args.rounds, at_most=False),
        Bar(f"ledger: requests off by more than {tolerance}", check.outside + check.missing, 0, at_most=True),
    ]
    return Part(rows, {"median_ms": check.median_ms, "max_ms": check.max_ms}, bars)


def hol_part(where: Where) -> Part:
    args = where.args
    report = where.report(workload="hol", short_tokens=args.short_tokens, long_tokens=args.long_tokens)
    figures = _figures(report)
    loaded = sum(record.group == "short loaded" and record.answered for record in report.records)
    rows = [
        ["hol: short prompt idle, median TTFT ms", _number(figures.get("short_idle_ttft_ms"))],
        ["hol: short prompt behind the long one, median TTFT ms", _number(figures.get("short_loaded_ttft_ms"))],
        ["hol: of so many short prompts", str(loaded)],
        ["hol: median over idle", _number(figures.get("short_ratio"))],
        ["hol: worst over idle", _number(figures.get("short_worst_ratio"))],
        ["hol: largest gap of the chat, ms", _number(figures.get("stream_largest_gap_ms"))],
        ["hol: the long prompt, TTFT ms", _number(figures.get("long_ttft_ms"))],
    ]
    worst = _number(figures.get("short_worst_ratio"))
    bars = [
        _bar(figures, "short_ratio", f"hol: short prompt over idle, median (worst {worst})", HOL_BAR),
        _bar(figures, "stream_largest_gap_ms", "hol: largest gap of the chat, ms", GAP_BAR_MS),
        Bar("hol: requests that failed", report.num_errors, 0, at_most=True),
    ]
    return Part(rows, dict(figures), bars)


def prefix_part(where: Where) -> Part:
    args = where.args
    report = where.report(workload="prefix", prefix_tokens=args.prefix_tokens, suffix_tokens=args.short_tokens)
    figures = _figures(report)
    rows = [
        ["prefix: cold, median TTFT ms", _number(figures.get("cold_ttft_ms"))],
        ["prefix: warm, median TTFT ms", _number(figures.get("warm_ttft_ms"))],
    ]
    bars = [
        _bar(figures, "warm_over_cold_ratio", "prefix: warm over cold", PREFIX_BAR),
        Bar("prefix: requests that failed", report.num_errors, 0, at_most=True),
    ]
    return Part(rows, dict(figures), bars)


def leave_part(where: Where) -> Part:
    args = where.args
    plan = Plan(*shares(args.leaving), long_tokens=args.long_tokens // 4, leave_after_s=args.leave_after)
    found = asyncio.run(Leaving(where.url, None, where.api_key, plan, seed=0).run())
    rows, results, bars = verdict(found)
    named = [Bar(f"leave: {bar.name}", bar.value, bar.limit, at_most=bar.at_most) for bar in bars]
    return Part([[f"leave: {name}", value] for name, value in rows], results, named)


PARTS: dict[str, Callable[[Where], Part]] = {
    "ledger": ledger_part,
    "hol": hol_part,
    "prefix": prefix_part,
    "leave": leave_part,
}


def _figures(report: Report) -> dict[str, float]:
    (figures,) = report.figures.values()
    return figures


def _bar(figures: dict[str, float], name: str, text: str, limit: float) -> Bar:
    """A figure that could not be measured is NaN, which is a miss."""
    return Bar(text, figures.get(name, math.nan), limit, at_most=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


@contextmanager
def server(args: argparse.Namespace) -> Iterator[Where]:
    """The server that was named, or one of our own for as long as the block runs."""
    if args.url is not None:
        yield Where(args.url, args.api_key, args)
        return
    memory = ["--kv-cache-memory", args.kv_cache_memory] if args.kv_cache_memory else []
    with LocalServer(args.model, memory) as own:
        yield Where(own.client.base_url, own.api_key, args)


def parts_of(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be of {', '.join(PARTS)}")
    return names


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"to serve (default {DEFAULT_MODEL})")
    parser.add_argument("--kv-cache-memory", metavar="SIZE", help="of the server, such as 2GB (default: the server's)")
    parser.add_argument("--url", help="take this running server instead of starting one")
    parser.add_argument("--api-key", help="of the server at --url")
    parser.add_argument("--only", type=parts_of, default=list(PARTS), metavar="PART,…", help=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=1, help="of ledger, hol, prefix; medians count (default 1)")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    sizes = parser.add_argument_group("loads, for a smoke run on a small model; the bars are meant for the defaults")
    sizes.add_argument("--requests", type=int, default=60, help="ledger: default 60")
    sizes.add_argument("--rate", type=float, default=1.0, help="ledger: arrivals a second (default 1)")
    sizes.add_argument("--short-tokens", type=int, default=64, help="default 64")
    sizes.add_argument("--long-tokens", type=int, default=6000, help="hol; a quarter of it for leave (default 6000)")
    sizes.add_argument("--prefix-tokens", type=int, default=1024, help="default 1024")
    sizes.add_argument("--leaving", type=int, default=200, help="leave: clients (default 200)")
    sizes.add_argument("--leave-after", type=parse_pair, default=Plan().leave_after_s, metavar="S,S", help="0.2,0.5")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    found: dict[str, Part] = {}
    with server(args) as where:
        for name in args.only:
            print(f"{name} ...", file=sys.stderr, flush=True)
            found[name] = PARTS[name](where)
    rows = [row for part in found.values() for row in part.rows]
    bars = [bar for part in found.values() for bar in part.bars]
    show("Bars on a running server", ("", "found"), rows, bars)
    return finish(args.json, {name: part.results for name, part in found.items()}, bars)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
