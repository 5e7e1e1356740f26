"""200 requests whose clients leave after 0.2 to 0.5 s: in decode, in prefill, in the queue. Nothing of them may stay.

The three come one after the other, so that each is certain to be met: short prompts with long answers at a rate that
the server keeps up with (left in decode), long prompts one at a time (left in prefill), a burst of both (left in the
queue). Afterwards the server must have as many free KV blocks as before, nothing running or waiting, and answer
a normal request as fast as before. Needs a running headstart server, otherwise idle.

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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _verdict import Bar, finish, run_main, show

from headstart.bench.http import HttpClient, Origin, encode_request
from headstart.bench.options import BenchError, BenchOptions
from headstart.bench.record import RequestRecord
from headstart.bench.session import RealClock, Session, SessionLimits
from headstart.bench.target import Target

SLOWDOWN_BAR = 1.25  # normal TTFT afterwards over before; the medians of an undisturbed machine differ by less
STAGE_BAR = 0.3  # share of a stage's clients that must have been met in it, or the run says nothing about it
PATIENCE_S = 60.0  # for the server to notice the last departure
SAMPLE_S = 0.03
ANSWER_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Plan:
    """How many clients leave in each stage, and how long their prompts are in tokens."""

    in_decode: int = 70
    in_prefill: int = 40
    in_queue: int = 90
    short_tokens: int = 48
    long_tokens: int = 1500
    decode_interval_s: float = 0.4  # mean; about one of them is being answered at any time
    leave_after_s: tuple[float, float] = (0.2, 0.5)
    num_normal: int = 15  # normal requests before and after

    @property
    def num_leaving(self) -> int:
        return self.in_decode + self.in_prefill + self.in_queue


@dataclass(frozen=True, slots=True)
class Gauges:
    """What the server says of itself in /metrics."""

    free_blocks: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Departures:
    """What came of a run."""

    left: dict[str, list[RequestRecord]]  # by the stage that they were meant to leave in
    most_waiting: int  # seen in the queue at once
    before: Gauges
    after: Gauges
    settled_s: float
    ttft_before_ms: list[float]
    ttft_after_ms: list[float]

    @property
    def ttft_ratio(self) -> float:
        return statistics.median(self.ttft_after_ms) / statistics.median(self.ttft_before_ms)

    def met(self) -> dict[str, int]:
        """How many were really met where they were meant to be left."""

        def gone(stage: str, *, answered: bool) -> int:
            return sum(r.status == "stopped" and (r.ttft_ms is not None) == answered for r in self.left[stage])

        return {
            "decode": gone("decode", answered=True),
            "prefill": gone("prefill", answered=False),  # alone with the server, so it was not waiting
            "queue": min(self.most_waiting, gone("queue", answered=False)),
        }


class _Body:
    """A sink that keeps the body."""

    def __init__(self) -> None:
        self.status = 0
        self.data = b""

    def on_sent(self, now: float) -> None: ...

    def on_head(self, status: int, headers: dict[str, str], now: float) -> None:
        self.status = status

    def on_body(self, data: bytes, now: float) -> None:
        self.data += data


class Leaving:
    """One run against one server."""

    def __init__(self, url: str, model: str | None, api_key: str | None, plan: Plan, seed: int) -> None:
        self._plan = plan
        self._rng = random.Random(seed)
        self._target = Target("server", url, BenchOptions(url=url, api_key=api_key), model=model)
        self._control = HttpClient(Origin.parse(url), connect_timeout=5)
        self._headers = [("Authorization", f"Bearer {api_key}")] if api_key else []
        self._session = Session(
            self._target.client, target="server", round_index=0, limits=SessionLimits(timeout=600), clock=RealClock()
        )

    async def run(self) -> Departures:
        """Raises `BenchError` if the server is no idle headstart server."""
        try:
            await self._target.prepare()
            return await self._run()
        finally:
            await self._session.interrupt()
            self._target.client.close()
            self._control.close()

    async def _run(self) -> Departures:
        ttft_before = await self._normal_ttfts()
        before = await self._gauges()
        if before.running or before.waiting:
            raise BenchError("the server is busy with other requests; this needs an otherwise idle one")
        left = {"decode": await self._leave_in_decode(), "prefill": await self._leave_in_prefill()}
        left["queue"], most_waiting = await self._watched(self._leave_in_queue)
        after, took = await self._settle(before)
        return Departures(left, most_waiting, before, after, took, ttft_before, await self._normal_ttfts())

    async def _leave_in_decode(self) -> list[RequestRecord]:
        times, now = [], self._session.elapsed()
        for _ in range(self._plan.in_decode):
            times.append(now)
            now += self._rng.expovariate(1 / self._plan.decode_interval_s)
        return list(await asyncio.gather(*(self._leave_one("short", at) for at in times)))

    async def _leave_in_prefill(self) -> list[RequestRecord]:
        return [await self._leave_one("long", self._session.elapsed()) for _ in range(self._plan.in_prefill)]

    async def _leave_in_queue(self) -> list[RequestRecord]:
        now = self._session.elapsed()
        groups = ["long" if self._rng.random() < 0.5 else "short" for _ in range(self._plan.in_queue)]
        return list(await asyncio.gather(*(self._leave_one(group, now) for group in groups)))

    async def _leave_one(self, group: str, planned: float) -> RequestRecord:
        """A client that comes at `planned` (seconds of the session) and leaves a little later."""
        maker, plan = self._target.maker, self._plan
        words = maker.unique(maker.num_words(plan.long_tokens if group == "long" else plan.short_tokens))
        request = self._target.plan(group, words, max_tokens=ANSWER_TOKENS)
        await self._session.sleep_until(planned)
        in_flight = self._session.start(request, planned=planned)
        await self._session.sleep_until(self._session.elapsed() + self._rng.uniform(*plan.leave_after_s))
        return await in_flight.stop()

    async def _watched(self, act: Callable[[], Awaitable[list[RequestRecord]]]) -> tuple[list[RequestRecord], int]:
        """Do it, and tell how many waited at once meanwhile."""
        acting = asyncio.ensure_future(act())
        most = 0
        while not acting.done():
            most = max(most, (await self._gauges()).waiting)
            await asyncio.wait((acting,), timeout=SAMPLE_S)
        return await acting, most

    async def _gauges(self) -> Gauges:
        body = _Body()
        await self._control.exchange(encode_request(self._control.origin, "GET", "/metrics", b"", self._headers), body)
        pairs = re.findall(rb"^(headstart_\w+) (\S+)$", body.data, re.MULTILINE)
        values = {name.decode(): float(value) for name, value in pairs}
        try:
            blocks, used = values["headstart_kv_blocks"], values["headstart_kv_cache_usage_ratio"]
            running, waiting = values["headstart_num_requests_running"], values["headstart_num_requests_waiting"]
        except KeyError as missing:
            raise BenchError(
                f"{self._control.origin.url}/metrics (HTTP {body.status}) has no {missing}; is it a headstart server?"
            ) from None
        return Gauges(round(blocks * (1 - used)), int(running), int(waiting))

    async def _settle(self, wanted: Gauges) -> tuple[Gauges, float]:
        """Until the gauges are as they were, at most `PATIENCE_S`; what they are then and how long it took."""
        began = time.perf_counter()
        while True:
            gauges = await self._gauges()
            took = time.perf_counter() - began
            if gauges == wanted or took > PATIENCE_S:
                return gauges, took
            await asyncio.sleep(SAMPLE_S)

    async def _normal_ttfts(self) -> list[float]:
        found = []
        for _ in range(self._plan.num_normal):
            words = self._target.maker.unique(self._target.maker.num_words(64))
            record = await self._session.send(self._target.plan("normal", words, max_tokens=8))
            if record.ttft_ms is None or record.status != "ok":
                raise BenchError(f"a normal request failed: {record.error}")
            found.append(record.ttft_ms)
        return found


def verdict(found: Departures) -> tuple[list[list[str]], dict[str, Any], list[Bar]]:
    """Table rows (what, value), results and bars."""
    met = found.met()
    records = [record for of_stage in found.left.values() for record in of_stage]
    medians = [statistics.median(values) for values in (found.ttft_before_ms, found.ttft_after_ms)]
    rows = [[f"left in {stage}", f"{count}/{len(found.left[stage])}"] for stage, count in met.items()]
    rows += [
        ["all free after, s", f"{found.settled_s:.2f}"],
        ["normal TTFT before, after, ms", ", ".join(f"{value:.1f}" for value in medians)],
    ]
    bars = [
        Bar("blocks that did not come back", found.before.free_blocks - found.after.free_blocks, 0, at_most=True),
        Bar("requests still running or waiting", found.after.running + found.after.waiting, 0, at_most=True),
        Bar("requests that failed", sum(record.failed for record in records), 0, at_most=True),
        Bar("normal TTFT, after over before", found.ttft_ratio, SLOWDOWN_BAR, at_most=True),
    ]
    bars += [
        Bar(f"clients met in {stage}, share", count / max(1, len(found.left[stage])), STAGE_BAR, at_most=False)
        for stage, count in met.items()
    ]
    results = {
        "met": met,
        "settled_s": found.settled_s,
        "ttft_before_ms": found.ttft_before_ms,
        "ttft_after_ms": found.ttft_after_ms,
    }
    return rows, results, bars


def parse_pair(text: str) -> tuple[float, float]:
    low, high = (float(part) for part in text.split(","))
    return low, high


def shares(total: int) -> Sequence[int]:
    """Of `total` clients, how many leave in decode, in prefill and in the queue; alike to `Plan`'s own."""
    decode, prefill = round(total * 0.35), round(total * 0.2)
    return decode, prefill, total - decode - prefill


def main() -> int:
    plan = Plan()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default=BenchOptions().url)
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key")
    parser.add_argument("--requests", type=int, default=plan.num_leaving, help=f"default {plan.num_leaving}")
    parser.add_argument("--long-tokens", type=int, default=plan.long_tokens, help=f"default {plan.long_tokens}")
    parser.add_argument(
        "--leave-after", type=parse_pair, default=plan.leave_after_s, metavar="S,S", help="seconds, default 0.2,0.5"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args()
    plan = Plan(*shares(args.requests), long_tokens=args.long_tokens, leave_after_s=args.leave_after)
    found = asyncio.run(Leaving(args.url, args.model, args.api_key, plan, args.seed).run())
    rows, results, bars = verdict(found)
    show(f"{plan.num_leaving} clients that left", ("", "found"), rows, bars)
    return finish(args.json, results, bars)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
