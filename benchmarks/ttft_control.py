"""TTFT under control: what the server says of it and does about it, against bars. Exit code 1 if one is missed.

Starts servers of its own with default settings but for what a part is about (on free ports, stopped at the end):

- `hol`: short prompts behind a 6,000-token one while a chat runs, for TPOT targets of 50, 100 and 200 ms: short prompts
  against their idle TTFT, the chat's p99 gap against the target, and the chunk sizes that were chosen.
- `predict`: Poisson at 0.7 of capacity: the TTFT that was predicted at admission against the one that the client saw.
- `policy`: Poisson at 0.9 of capacity, log-uniform lengths 32-4,000, the same arrivals at a `srpf` and a `fcfs`
  server: mean TTFT, and whether anybody waited longer past its turn than `srpf` promises.
- `overload`: Poisson at twice the capacity with a TTFT SLO, at a server that rejects and one that queues: who of the
  accepted met it, goodput, and how long a rejection took.
- `hot`: a hot prefix of 512 tokens, then unique prompts of twice the cache's size, then the prefix again.

Capacity is measured in the same run: requests of the same lengths, all at once, over the time they take.
The machine should do nothing else: client and servers share its cores already.

    python benchmarks/ttft_control.py
    python benchmarks/ttft_control.py --only hol,hot
"""

from __future__ import annotations

import argparse
import math
import random
import re
import secrets
import statistics
import string
import sys
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _verdict import Bar, finish, run_main, show

from headstart.bench import BenchOptions, Report, run
from headstart.bench.options import LengthDist
from headstart.bench.record import RequestRecord
from headstart.bench.stats import GroupSummary
from headstart.cli.client import Answer
from headstart.cli.local_server import LocalServer
from headstart.config import DEFAULT_MODEL, CacheConfig, SchedulerConfig

TPOT_TARGETS_MS = (50, 100, 200)
SHORT_BAR = 3.0  # short prompts behind the long one over their idle TTFT
ITL_BAR = 1.3  # p99 gap of the chat over the TPOT target
PREDICT_LOAD, PREDICT_BAR = 0.7, 0.10
POLICY_LOAD, POLICY_BAR = 0.9, 0.5
# As many from 32 to 64 as from 2,000 to 4,000, as prompts in the field are. Were they uniform, no order could halve the
# mean: the shortest-remaining-first, which no order beats, would reach 0.68 of first come, first served.
POLICY_LENGTHS = LengthDist(32, 4000, log=True)
OVERLOAD, KEPT_BAR, GOODPUT_BAR, REJECTION_BAR_MS = 2.0, 0.9, 2.0, 20.0
HOT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Part:
    """One group of bars: table rows (what, value), the numbers for the file, and the bars."""

    rows: list[list[str]]
    results: dict[str, Any]
    bars: list[Bar]


class Servers:
    """Starts servers as they are asked for; all are stopped when the block ends."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._key = secrets.token_urlsafe(16)
        self._stack = ExitStack()
        self._running: dict[tuple[str, ...], LocalServer] = {}

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def get(self, *arguments: str, memory: str | None = None) -> LocalServer:
        """The one with these arguments. All have one key, as two servers of one run must."""
        whole = ("--kv-cache-memory", memory or self._args.kv_cache_memory, *arguments)
        if whole not in self._running:
            self._running[whole] = self._stack.enter_context(LocalServer(self._args.model, whole, api_key=self._key))
        return self._running[whole]


def report_of(server: LocalServer, against: LocalServer | None = None, **options: Any) -> Report:
    other = {"against": against.client.base_url} if against is not None else {}
    return run(BenchOptions(url=server.client.base_url, api_key=server.api_key, **other, **options))


def capacity(server: LocalServer, lengths: LengthDist, requests: int) -> float:
    """Requests a second when there is always one waiting. The lengths are those of a run with as many requests."""
    report = report_of(server, workload="poisson", requests=requests, rate=1e6, prompt_tokens=lengths)
    (group,) = report.groups
    return group.qps or math.nan


def hol_part(servers: Servers, args: argparse.Namespace) -> Part:
    rows: list[list[str]] = []
    bars: list[Bar] = []
    results: dict[str, Any] = {}
    for target in TPOT_TARGETS_MS:
        with Servers(args) as own:
            server = own.get("--slo-tpot-ms", str(target))
            report_of(server, workload="hol", requests=3, long_tokens=args.long_tokens // 2)  # learns what steps cost
            report = report_of(server, workload="hol", rounds=args.rounds, long_tokens=args.long_tokens)
        (figures,), (chunks,) = report.figures.values(), report.chunks.values()
        ratio, itl = figures.get("short_ratio", math.nan), figures.get("stream_itl_p99_ms", math.nan)
        loaded = sum(record.group == "short loaded" and record.answered for record in report.records)
        rows += [
            [f"hol {target} ms: short prompt idle, median TTFT ms", number(figures.get("short_idle_ttft_ms"))],
            [f"hol {target} ms: behind the long one (of {loaded})", number(figures.get("short_loaded_ttft_ms"))],
            [f"hol {target} ms: p99 gap of the chat, ms", number(itl)],
            [f"hol {target} ms: the long prompt, TTFT ms", number(figures.get("long_ttft_ms"))],
            *(
                [f"hol {target} ms: steps of {each.above + 1}-{each.up_to or 'any'} prompt tokens", str(each.steps)]
                for each in chunks
            ),
        ]
        bars += [
            Bar(f"hol {target} ms: short prompt over idle, median", ratio, SHORT_BAR, at_most=True),
            Bar(f"hol {target} ms: p99 gap of the chat over the target", itl / target, ITL_BAR, at_most=True),
            Bar(f"hol {target} ms: requests that failed", report.num_errors, 0, at_most=True),
        ]
        results[str(target)] = figures
    return Part(rows, results, bars)


def predict_part(servers: Servers, args: argparse.Namespace) -> Part:
    server = servers.get()
    lengths = LengthDist(32, args.predict_tokens)
    most = capacity(server, lengths, args.requests)
    report = report_of(
        server, workload="poisson", requests=args.requests, rate=PREDICT_LOAD * most, prompt_tokens=lengths
    )
    (group,) = report.groups
    error = group.prediction_error
    found = (error.p50, error.p90) if error is not None else (math.nan, math.nan)
    signed = [record.predicted_ttft_ms / record.ttft_ms for record in report.records if told(record)]
    rows = [
        ["predict: capacity, requests a second", number(most)],
        ["predict: TTFT p50, p90, ms", two(group)],
        ["predict: off by, median", f"{found[0]:.1%}"],
        ["predict: off by, p90", f"{found[1]:.1%}"],
        ["predict: predicted over real, median", number(statistics.median(signed) if signed else None)],
    ]
    bars = [
        Bar(f"predict: TTFT off by, median at {PREDICT_LOAD} of capacity", found[0], PREDICT_BAR, at_most=True),
        Bar("predict: requests that failed", report.num_errors, 0, at_most=True),
    ]
    return Part(rows, {"capacity": most, "median": found[0], "p90": found[1]}, bars)


def told(record: RequestRecord) -> bool:
    return bool(record.answered and record.predicted_ttft_ms and record.ttft_ms)


def policy_part(servers: Servers, args: argparse.Namespace) -> Part:
    ours, theirs = servers.get("--policy", "srpf"), servers.get("--policy", "fcfs")
    most = capacity(theirs, POLICY_LENGTHS, args.policy_requests)
    report_of(ours, workload="idle", lengths=(32, 512, 4000), requests=2)  # learns what steps cost, as the other did
    report = report_of(
        ours,
        theirs,
        workload="poisson",
        requests=args.policy_requests,
        rate=POLICY_LOAD * most,
        prompt_tokens=POLICY_LENGTHS,
        rounds=args.rounds,
    )
    pairs = paired(report)
    means = [statistics.fmean(record.ttft_ms for pair in pairs if (record := pair[side]).ttft_ms) for side in (0, 1)]
    config = SchedulerConfig()
    beyond = []
    for one, other in pairs:
        alone = prefill_ms(one)
        bound = max(config.aging_ms, config.aging_factor * alone)
        beyond.append(one.ttft_ms - other.ttft_ms - bound)
    rows = [
        ["policy: capacity, requests a second", number(most)],
        ["policy: mean TTFT with srpf, ms", number(means[0])],
        ["policy: mean TTFT with fcfs, ms", number(means[1])],
        ["policy: longest past its turn, ms", number(max(one.ttft_ms - other.ttft_ms for one, other in pairs))],
    ]
    bars = [
        Bar("policy: mean TTFT, srpf over fcfs", means[0] / means[1], POLICY_BAR, at_most=True),
        Bar("policy: requests beyond the bound", sum(each > 0 for each in beyond), 0, at_most=True),
        Bar("policy: requests that failed", report.num_errors, 0, at_most=True),
    ]
    return Part(rows, {"capacity": most, "srpf_ms": means[0], "fcfs_ms": means[1]}, bars)


def paired(report: Report) -> list[tuple[Any, Any]]:
    """The same arrival at both servers, where both answered."""
    by_key: dict[tuple[int, int], dict[str, RequestRecord]] = {}
    for record in report.records:
        if record.answered:
            by_key.setdefault((record.round, record.index), {})[record.target] = record
    return [(both["A"], both["B"]) for both in by_key.values() if len(both) == 2]


def prefill_ms(record: RequestRecord) -> float:
    return (record.ledger or {}).get("prefill", 0.0)


def overload_part(servers: Servers, args: argparse.Namespace) -> Part:
    lengths = LengthDist(32, args.predict_tokens)
    plain = servers.get()
    most = capacity(plain, lengths, args.overload_requests)
    idle = report_of(plain, workload="idle", lengths=(args.predict_tokens,), requests=5)
    (group,) = idle.groups
    assert group.ttft is not None
    slo = round(args.slo_factor * group.ttft.p50)
    ask = ("--slo-ttft-ms", str(slo), "--on-slo-miss")
    ours, theirs = servers.get(*ask, "reject"), servers.get(*ask, "queue")
    for server in (ours, theirs):  # both know what steps cost
        report_of(server, workload="idle", lengths=(32, args.predict_tokens), requests=3)
    options: dict[str, Any] = {
        "workload": "poisson",
        "requests": args.overload_requests,
        "rate": OVERLOAD * most,
        "prompt_tokens": lengths,
        "slo_ttft_ms": slo,
        "rounds": args.rounds,
    }
    ours_group, theirs_group = both_groups(report_of(ours, theirs, **options))
    kept = ours_group.slo_met_accepted or 0.0
    rejection = ours_group.rejection
    ratio = (ours_group.goodput or 0.0) / theirs_group.goodput if theirs_group.goodput else math.inf
    rows = [
        ["overload: capacity, requests a second", number(most)],
        ["overload: SLO, ms", str(slo)],
        ["overload: rejected", f"{ours_group.rejected} of {ours_group.requests}"],
        ["overload: accepted that met the SLO", f"{kept:.1%}"],
        [
            "overload: goodput with reject, queue (requests/s)",
            f"{number(ours_group.goodput)}, {number(theirs_group.goodput)}",
        ],
        [
            "overload: rejection p50, p90, p99, ms",
            "-" if rejection is None else f"{rejection.p50:.1f}, {rejection.p90:.1f}, {rejection.p99:.1f}",
        ],
    ]
    bars = [
        Bar("overload: share of the accepted that met the SLO", kept, KEPT_BAR, at_most=False),
        Bar("overload: goodput, reject over queue", ratio, GOODPUT_BAR, at_most=False),
        Bar("overload: rejection, p99 ms", rejection.p99 if rejection else math.nan, REJECTION_BAR_MS, at_most=True),
        Bar("overload: requests that failed", ours_group.errors + theirs_group.errors, 0, at_most=True),
    ]
    return Part(rows, {"capacity": most, "slo_ms": slo, "kept": kept, "goodput_ratio": ratio}, bars)


def both_groups(report: Report) -> tuple[GroupSummary, GroupSummary]:
    by_target = {group.target: group for group in report.groups}
    return by_target["A"], by_target["B"]


def hot_part(servers: Servers, args: argparse.Namespace) -> Part:
    rng = random.Random(0)
    hot = " ".join(rng.choices(string.ascii_lowercase, k=HOT_TOKENS))  # a letter is a token
    with Servers(args) as own:
        server = own.get(memory=args.hot_memory)
        cache_tokens = kv_tokens(server)
        for turn in range(4):
            asked = ask(server, hot, turn)
        length, sent = min(1000, cache_tokens // 8), 0
        while sent < 2 * cache_tokens:
            report = report_of(server, workload="idle", lengths=(length,), requests=8, output_tokens=LengthDist(1, 1))
            sent += sum(record.prompt_tokens or 0 for record in report.records)
        again = ask(server, hot, 4)
    rows = [
        ["hot: KV cache, tokens", f"{cache_tokens:,}"],
        ["hot: unique prompts in between, tokens", f"{sent:,}"],
        ["hot: tokens of the hot prompt, cached before", f"{asked.num_prompt_tokens}, {asked.num_cached_tokens}"],
        ["hot: cached after the burst", str(again.num_cached_tokens)],
    ]
    bars = [Bar("hot: cached tokens after the burst", again.num_cached_tokens, HOT_TOKENS, at_most=False)]
    return Part(rows, {"cache_tokens": cache_tokens, "sent": sent, "cached": again.num_cached_tokens}, bars)


def ask(server: LocalServer, system: str, turn: int) -> Answer:
    """A question that differs each time, after a system prompt that does not."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Question {turn}?"}]
    return server.client.chat(server.client.models()[0], messages, max_tokens=2, temperature=0)


def kv_tokens(server: LocalServer) -> int:
    """Tokens that the KV cache holds."""
    request = urllib.request.Request(f"{server.client.base_url}/metrics")
    request.add_header("Authorization", f"Bearer {server.api_key}")
    with urllib.request.urlopen(request) as answer:
        found = re.search(r"^headstart_kv_blocks (\d+)", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * CacheConfig().block_size


PARTS: dict[str, Callable[[Servers, argparse.Namespace], Part]] = {
    "hol": hol_part,
    "predict": predict_part,
    "policy": policy_part,
    "overload": overload_part,
    "hot": hot_part,
}


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def two(group: GroupSummary) -> str:
    return "-" if group.ttft is None else f"{group.ttft.p50:.0f}, {group.ttft.p90:.0f}"


def parts_of(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be of {', '.join(PARTS)}")
    return names


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"to serve (default {DEFAULT_MODEL})")
    parser.add_argument("--kv-cache-memory", metavar="SIZE", default="2GB", help="of each server (default 2GB)")
    parser.add_argument("--only", type=parts_of, default=list(PARTS), metavar="PART,…", help=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=1, help="of hol, policy and overload (default 1)")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    sizes = parser.add_argument_group("loads, for a smoke run on a small model; the bars are meant for the defaults")
    sizes.add_argument("--long-tokens", type=int, default=6000, help="hol (default 6000)")
    sizes.add_argument("--requests", type=int, default=100, help="predict, and to measure capacity (default 100)")
    sizes.add_argument("--predict-tokens", type=int, default=1000, help="predict, overload: longest prompt (1000)")
    sizes.add_argument("--policy-requests", type=int, default=120, help="policy (default 120)")
    sizes.add_argument("--overload-requests", type=int, default=200, help="overload (default 200)")
    sizes.add_argument("--slo-factor", type=float, default=3.0, help="overload: SLO over the longest's idle TTFT (3)")
    sizes.add_argument("--hot-memory", metavar="SIZE", default="256MB", help="hot: the KV cache (default 256MB)")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    found: dict[str, Part] = {}
    for name in args.only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        with Servers(args) as servers:
            found[name] = PARTS[name](servers, args)
    rows = [row for part in found.values() for row in part.rows]
    bars = [bar for part in found.values() for bar in part.bars]
    show("TTFT under control", ("", "found"), rows, bars)
    return finish(args.json, {name: part.results for name, part in found.items()}, bars)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
