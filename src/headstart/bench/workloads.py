"""The synthetic workloads and chat: what is sent when, and the figures that each is run for.

A workload plans with the target's terms and sends through a session; it owns no clock, no socket and no statistics.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from headstart.bench.options import (
    DEFAULT_CONVERSATIONS,
    DEFAULT_OUTPUT_TOKENS,
    DEFAULT_REQUESTS,
    BenchOptions,
    LengthDist,
)
from headstart.bench.prompts import LEAD_WORDS, text_of
from headstart.bench.questions import read_questions
from headstart.bench.record import RequestRecord
from headstart.bench.session import InFlight, RequestPlan, Session
from headstart.bench.stats import percentile
from headstart.bench.target import Target

Figures = dict[str, float]
SHORT_DELAY_S = 0.2  # hol: from the long prompt to the first short one


class Workload(Protocol):
    """One kind of load. The same instance serves every round and target."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the report must know of the load."""
        ...

    def num_requests(self) -> int:
        """How many requests a round sends (for the progress bar; hol may send fewer)."""
        ...

    async def run(self, session: Session, target: Target, rng: random.Random) -> None:
        """One round. `rng` is seeded alike for every target of a round."""
        ...

    def figures(self, records: Sequence[RequestRecord]) -> Figures:
        """What this workload is run for, from one target's records of one round. Names end in their unit."""
        ...


def num_requests_of(options: BenchOptions) -> int:
    return options.requests or DEFAULT_REQUESTS[options.workload]


def output_tokens_of(options: BenchOptions) -> LengthDist:
    return options.output_tokens or DEFAULT_OUTPUT_TOKENS.get(options.workload, LengthDist(16, 16))


async def send_open_loop(session: Session, arrivals: Iterable[tuple[float, RequestPlan]]) -> None:
    """Send each plan at its offset (seconds), whatever is in flight, then wait for all."""
    for offset, plan in arrivals:
        await session.sleep_until(offset)
        session.start(plan, planned=offset)
    await session.drain()


def median_of(
    records: Iterable[RequestRecord], group: str, field: Callable[[RequestRecord], float | None]
) -> float | None:
    values = [
        value
        for record in records
        if record.group == group and record.answered and (value := field(record)) is not None
    ]
    return median(values) if values else None


def ttft(record: RequestRecord) -> float | None:
    return record.ttft_ms


@dataclass(frozen=True, slots=True)
class Idle:
    """Prompts of given lengths, one at a time: nothing to wait for."""

    options: BenchOptions
    notes: tuple[str, ...] = ()

    def num_requests(self) -> int:
        return len(self.options.lengths) * num_requests_of(self.options)

    async def run(self, session: Session, target: Target, rng: random.Random) -> None:
        for _ in range(num_requests_of(self.options)):
            for length in self.options.lengths:
                words = target.maker.unique(target.maker.num_words(length))
                max_tokens = output_tokens_of(self.options).draw(rng)
                await session.send(target.plan(f"idle {length}", words, max_tokens=max_tokens, wanted=length))

    def figures(self, records: Sequence[RequestRecord]) -> Figures:
        found: Figures = {}
        for length in self.options.lengths:
            value = median_of(records, f"idle {length}", ttft)
            if value:
                found[f"prefill_{length}_tokens_per_s"] = length / value * 1e3
        return found


@dataclass(frozen=True, slots=True)
class Prefix:
    """A shared system prompt, fresh in every pair: first cold, then again with another question."""

    options: BenchOptions
    notes: tuple[str, ...] = ()

    def num_requests(self) -> int:
        return 2 * num_requests_of(self.options)

    async def run(self, session: Session, target: Target, rng: random.Random) -> None:
        maker, options = target.maker, self.options
        total = options.prefix_tokens + options.suffix_tokens
        for _ in range(num_requests_of(options)):
            num_words = maker.num_words(total)
            system = maker.unique(max(LEAD_WORDS, num_words - options.suffix_tokens))
            for group in ("cold", "warm"):
                words = system + maker.unique(max(1, num_words - len(system)))
                max_tokens = output_tokens_of(options).draw(rng)
                await session.send(
                    target.plan(group, words, max_tokens=max_tokens, system_words=len(system), wanted=total)
                )

    def figures(self, records: Sequence[RequestRecord]) -> Figures:
        cold, warm = median_of(records, "cold", ttft), median_of(records, "warm", ttft)
        if cold is None or warm is None:
            return {}
        return {"cold_ttft_ms": cold, "warm_ttft_ms": warm, "warm_over_cold_ratio": warm / cold}


@dataclass(frozen=True, slots=True)
class HeadOfLine:
    """Short prompts that arrive while one very long prompt is computed and chats are running."""

    options: BenchOptions
    notes: tuple[str, ...] = ()

    def num_requests(self) -> int:
        return 2 * num_requests_of(self.options) + 1

    async def run(self, session: Session, target: Target, rng: random.Random) -> None:
        for _ in range(num_requests_of(self.options)):
            await session.send(self._plan(target, "short idle", self.options.short_tokens, rng))
        over = asyncio.Event()
        ready = [asyncio.Event() for _ in range(self.options.streams)]
        async with asyncio.TaskGroup() as chats:
            for event in ready:
                chats.create_task(self._chat(session, target, event, over))
            try:
                for event in ready:
                    await event.wait()
                await self._load(session, target, rng)
            finally:
                over.set()
        await session.drain()

    async def _load(self, session: Session, target: Target, rng: random.Random) -> None:
        """The long prompt, and short ones on their schedule for as long as it has no first token."""
        long = session.start(self._plan(target, "long", self.options.long_tokens, rng))
        plans = [
            self._plan(target, "short loaded", self.options.short_tokens, rng)
            for _ in range(num_requests_of(self.options))
        ]
        began = session.elapsed()
        sent: list[InFlight] = []
        for index, plan in enumerate(plans):
            offset = began + SHORT_DELAY_S + index * self.options.short_interval
            await session.sleep_until(offset)
            if long.first_delta.is_set() or long.done():
                break
            sent.append(session.start(plan, planned=offset))
        for in_flight in (*sent, long):
            await in_flight.record()

    async def _chat(self, session: Session, target: Target, ready: asyncio.Event, over: asyncio.Event) -> None:
        """One chat that never pauses: an answer that ends is followed by the next, until `over`."""
        failures = 0
        while not over.is_set():
            words = target.maker.unique(target.maker.num_words(self.options.short_tokens))
            stream = session.start(target.plan("stream", words, max_tokens=self.options.stream_tokens))
            await stream.answering()
            ready.set()
            ended = asyncio.ensure_future(stream.record())
            waiter = asyncio.ensure_future(over.wait())
            await asyncio.wait((ended, waiter), return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()
            record = await stream.stop()
            failures = failures + 1 if record.failed else 0
            if failures == 3:  # each is in the report; more would only be noise
                return

    def _plan(self, target: Target, group: str, length: int, rng: random.Random) -> RequestPlan:
        words = target.maker.unique(target.maker.num_words(length))
        return target.plan(group, words, max_tokens=output_tokens_of(self.options).draw(rng), wanted=length)

    def figures(self, records: Sequence[RequestRecord]) -> Figures:
        idle, loaded = median_of(records, "short idle", ttft), median_of(records, "short loaded", ttft)
        found: Figures = {}
        if idle is not None:
            found["short_idle_ttft_ms"] = idle
        if idle is not None and loaded is not None:
            worst = max(
                record.ttft_ms or 0.0 for record in records if record.group == "short loaded" and record.answered
            )
            found |= {"short_loaded_ttft_ms": loaded, "short_ratio": loaded / idle, "short_worst_ratio": worst / idle}
        gaps = [record.max_gap_ms for record in records if record.group == "stream" and record.max_gap_ms is not None]
        if gaps:
            found["stream_largest_gap_ms"] = max(gaps)
        between = [gap for record in records if record.group == "stream" for gap in record.gaps_ms]
        if between:
            found["stream_itl_p99_ms"] = percentile(between, 0.99)
        long = median_of(records, "long", ttft)
        if long is not None:
            found["long_ttft_ms"] = long
        return found


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent requests at a mean rate; lengths and arrivals are the same for every target of a round."""

    options: BenchOptions
    notes: tuple[str, ...] = ()

    def num_requests(self) -> int:
        return num_requests_of(self.options)

    async def run(self, session: Session, target: Target, rng: random.Random) -> None:
        arrivals: list[tuple[float, RequestPlan]] = []
        offset = 0.0
        for _ in range(num_requests_of(self.options)):
            offset += rng.expovariate(self.options.rate)
            length = self.options.prompt_tokens.draw(rng)
            words = target.maker.unique(target.maker.num_words(length))
            max_tokens = output_tokens_of(self.options).draw(rng)
            arrivals.append((offset, target.plan("poisson", words, max_tokens=max_tokens, wanted=length)))
        lead = session.elapsed()  # what planning took
        await send_open_loop(session, ((lead + at, plan) for at, plan in arrivals))

    def figures(self, records: Sequence[RequestRecord]) -> Figures:
        return {}


class Chat:
    """Conversations that begin at a mean rate; a next turn follows the answer, with all that was said before."""

    notes: tuple[str, ...] = ()

    def __init__(self, options: BenchOptions) -> None:
        self.options = options
        self._conversations = read_questions(options.file, options.limit or DEFAULT_CONVERSATIONS)

    def num_requests(self) -> int:
        return sum(len(turns) for turns in self._conversations)

    async def run(self, session: Session, target: Target, rng: random.Random) -> None:
        offset = session.elapsed()
        async with asyncio.TaskGroup() as talks:
            for turns in self._conversations:
                offset += rng.expovariate(self.options.rate)
                await session.sleep_until(offset)
                seed = rng.getrandbits(32)
                talks.create_task(self._talk(session, target, turns, random.Random(seed), offset))

    async def _talk(
        self, session: Session, target: Target, turns: tuple[str, ...], rng: random.Random, planned: float
    ) -> None:
        maker = target.maker
        lead = f"Note: {text_of(maker.unique(LEAD_WORDS))}."  # no earlier run has asked exactly this
        messages: list[dict[str, str]] = []
        if maker.shape.has_system:
            messages.append({"role": "system", "content": lead})
        for number, text in enumerate(turns, 1):
            content = text if maker.shape.has_system or number > 1 else f"{lead}\n{text}"
            messages.append({"role": "user", "content": content})
            plan = target.plan_chat(f"turn {number}", messages, max_tokens=output_tokens_of(self.options).draw(rng))
            in_flight = session.start(plan, planned=planned if number == 1 else None)
            record = await in_flight.record()
            if record.status != "ok":
                return
            messages.append({"role": "assistant", "content": in_flight.text})

    def figures(self, records: Sequence[RequestRecord]) -> Figures:
        first, second = median_of(records, "turn 1", ttft), median_of(records, "turn 2", ttft)
        if first is None or second is None:
            return {}
        return {"first_turn_ttft_ms": first, "second_turn_ttft_ms": second}
