"""200 requests whose clients leave: in the queue, in the prefill, in the decode. Nothing of them may stay.

Half have long prompts (left in their prefill, or in the queue behind it), half short prompts with long answers (left in
their decode, or in the queue). Afterwards the server must have as many free KV blocks as before, nothing running or
waiting, and answer a normal request as fast as before. Needs a running headstart server, otherwise idle.

    headstart serve &
    python benchmarks/client_leaves.py
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from _verdict import Bar, finish, show

from headstart.bench.http import HttpClient, Origin, encode_request
from headstart.bench.options import BenchError, BenchOptions
from headstart.bench.record import RequestRecord
from headstart.bench.session import RealClock, Session, SessionLimits
from headstart.bench.target import Target

SLOWDOWN_BAR = 1.25  # normal TTFT afterwards over before; the medians of an undisturbed machine differ by less
LEAVE_AFTER_S = (0.2, 0.5)
PATIENCE_S = 60.0  # for the server to notice the last departure


@dataclass(frozen=True, slots=True)
class Gauges:
    """What the server says of itself in /metrics."""

    free_blocks: int
    running: int
    waiting: int


class _Body:
    """A sink that keeps the body."""

    def __init__(self) -> None:
        self.data = b""

    def on_sent(self, now: float) -> None: ...

    def on_head(self, status: int, headers: dict[str, str], now: float) -> None: ...

    def on_body(self, data: bytes, now: float) -> None:
        self.data += data


async def read_gauges(client: HttpClient) -> Gauges:
    body = _Body()
    await client.exchange(encode_request(client.origin, "GET", "/metrics", b""), body)
    pairs = re.findall(rb"^(headstart_\w+) (\S+)$", body.data, re.MULTILINE)
    values = {name.decode(): float(value) for name, value in pairs}
    try:
        blocks, used = values["headstart_kv_blocks"], values["headstart_kv_cache_usage_ratio"]
        running, waiting = values["headstart_num_requests_running"], values["headstart_num_requests_waiting"]
    except KeyError as missing:
        raise BenchError(f"{client.origin.url}/metrics has no {missing}; is it a headstart server?") from None
    return Gauges(round(blocks * (1 - used)), int(running), int(waiting))


async def settle(client: HttpClient, wanted: Gauges) -> tuple[Gauges, float]:
    """Until the gauges are as they were, at most `PATIENCE_S`; what they are then and how long it took."""
    began = time.perf_counter()
    while True:
        gauges = await read_gauges(client)
        took = time.perf_counter() - began
        if gauges == wanted or took > PATIENCE_S:
            return gauges, took
        await asyncio.sleep(0.05)


async def normal_ttfts(session: Session, target: Target, count: int) -> list[float]:
    found = []
    for _ in range(count):
        words = target.maker.unique(target.maker.num_words(64))
        record = await session.send(target.plan("normal", words, max_tokens=8))
        if record.ttft_ms is None or record.status != "ok":
            raise BenchError(f"a normal request failed: {record.error}")
        found.append(record.ttft_ms)
    return found


async def leave_one(session: Session, target: Target, rng: random.Random, planned: float) -> RequestRecord:
    """A client that comes at `planned` (seconds of the session) and leaves 0.2 to 0.5 s later."""
    is_long = rng.random() < 0.5
    words = target.maker.unique(target.maker.num_words(1500 if is_long else 48))
    plan = target.plan("long" if is_long else "short", words, max_tokens=512)
    await session.sleep_until(planned)
    in_flight = session.start(plan, planned=planned)
    await session.sleep_until(planned + rng.uniform(*LEAVE_AFTER_S))
    return await in_flight.stop()


def arrivals(count: int, rate: float, rng: random.Random, began: float) -> list[float]:
    """Half at `rate`, to be left while they are computed; half ten times as fast, to be left in the queue."""
    times, now = [], began
    for index in range(count):
        now += rng.expovariate(rate if index < count // 2 else 10 * rate)
        times.append(now)
    return times


async def measure(args: argparse.Namespace) -> int:
    options = BenchOptions(url=args.url, model=args.model, api_key=args.api_key)
    target = Target("server", args.url, options, model=args.model)
    await target.prepare()
    control = HttpClient(Origin.parse(args.url), connect_timeout=5)
    limits = SessionLimits(timeout=600)
    session = Session(target.client, target="server", round_index=0, limits=limits, clock=RealClock())
    before_ttft = await normal_ttfts(session, target, args.normal)
    before = await read_gauges(control)
    if before.running or before.waiting:
        raise BenchError("the server is busy with other requests; this needs an otherwise idle one")

    rng = random.Random(args.seed)
    began = session.elapsed()
    times = arrivals(args.requests, args.rate, rng, began)
    left = await asyncio.gather(*(leave_one(session, target, rng, at) for at in times))
    after, took = await settle(control, before)
    after_ttft = await normal_ttfts(session, target, args.normal)
    target.client.close()
    control.close()
    return show_results(args, left, (before, after), took, (before_ttft, after_ttft))


def show_results(
    args: argparse.Namespace,
    left: list[RequestRecord],
    gauges: tuple[Gauges, Gauges],
    took: float,
    ttfts: tuple[list[float], list[float]],
) -> int:
    stages = Counter(
        "finished before its client left" if record.status == "ok"
        else f"failed: {record.error}" if record.failed
        else "left in decode" if record.ttft_ms is not None
        else "left in queue or prefill"
        for record in left
    )  # fmt: skip
    medians = [statistics.median(values) for values in ttfts]
    rows = [
        ["free KV blocks", *(str(each.free_blocks) for each in gauges)],
        ["running / waiting", *(f"{each.running} / {each.waiting}" for each in gauges)],
        ["normal request, median TTFT ms", *(f"{value:.1f}" for value in medians)],
    ]
    bars = [
        Bar("blocks that did not come back", gauges[0].free_blocks - gauges[1].free_blocks, 0, at_most=True),
        Bar("requests still running or waiting", gauges[1].running + gauges[1].waiting, 0, at_most=True),
        Bar("requests that failed", sum(record.failed for record in left), 0, at_most=True),
        Bar("normal TTFT, after over before", medians[1] / medians[0], SLOWDOWN_BAR, at_most=True),
    ]
    title = f"{len(left)} clients that left; all was free {took:.2f} s after the last"
    show(title, ("", "before", "after"), rows, bars)
    print("  ".join(f"{count} {stage}." for stage, count in stages.most_common()))
    results = {"stages": stages, "settled_s": took, "ttft_before_ms": ttfts[0], "ttft_after_ms": ttfts[1]}
    return finish(args.json, results, bars)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default=BenchOptions().url)
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key")
    parser.add_argument("--requests", type=int, default=200, help="default 200")
    parser.add_argument(
        "--rate", type=float, default=5.0, help="arrivals a second at first (default 5); later ten times that"
    )
    parser.add_argument("--normal", type=int, default=15, help="normal requests before and after (default 15)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args()
    try:
        return asyncio.run(measure(args))
    except BenchError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    raise SystemExit(main())
