"""Runs a benchmark: prepares the targets, takes the rounds in turn, and makes the report. Prints nothing.

The only place that makes an event loop; Ctrl-C ends the run early and the report holds what there is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from typing import Any, Protocol

try:
    import uvloop

    _new_event_loop: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
except ImportError:  # an optional speed-up
    _new_event_loop = None

import msgspec

from headstart.bench.chunks import ChunkClass, add_chunks, chunks_between
from headstart.bench.ledger import check_ledger
from headstart.bench.options import BenchOptions, validate
from headstart.bench.record import RequestRecord
from headstart.bench.replay import Trace
from headstart.bench.report import Report, TargetInfo, ratios
from headstart.bench.session import RealClock, Session, SessionLimits
from headstart.bench.stats import SLO, median_figures, over_rounds, summarise
from headstart.bench.target import Target
from headstart.bench.workloads import Chat, HeadOfLine, Idle, Poisson, Prefix, Workload

_WORKLOADS: dict[str, Callable[[BenchOptions], Workload]] = {
    "idle": Idle,
    "prefix": Prefix,
    "hol": HeadOfLine,
    "poisson": Poisson,
    "chat": Chat,
    "trace": Trace,
}


class Progress(Protocol):
    """Who wants to know how far a run is."""

    def preparing(self, target: str) -> None: ...

    def round_begins(self, target: str, round_index: int, num_requests: int) -> None: ...

    def request_ended(self, record: RequestRecord) -> None: ...


class NoProgress:
    def preparing(self, target: str) -> None: ...

    def round_begins(self, target: str, round_index: int, num_requests: int) -> None: ...

    def request_ended(self, record: RequestRecord) -> None: ...


def run(options: BenchOptions, progress: Progress | None = None) -> Report:
    """Run the benchmark and return its report. Raises `BenchError` if it cannot begin.

    SIGINT ends the run: the report is then marked `interrupted`.
    """
    validate(options)
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        return runner.run(run_async(options, progress))


async def run_async(options: BenchOptions, progress: Progress | None = None) -> Report:
    """`run` inside a running event loop. A cancellation ends the run early and returns its report."""
    validate(options)
    workload = _WORKLOADS[options.workload](options)
    targets = [Target("A" if options.against else "server", options.url, options, model=options.model)]
    if options.against:
        targets.append(Target("B", options.against, options, model=options.against_model))
    bench = _Bench(options, workload, targets, progress or NoProgress())
    started = datetime.now(UTC)
    try:
        for target in targets:
            bench.progress.preparing(target.name)
            await target.prepare()
        await bench.take_rounds()
    finally:
        for target in targets:
            target.client.close()
    return bench.report(started)


class _Bench:
    def __init__(
        self, options: BenchOptions, workload: Workload, targets: Sequence[Target], progress: Progress
    ) -> None:
        self.options = options
        self.progress = progress
        self._workload = workload
        self._targets = targets
        self._records: list[RequestRecord] = []
        self._chunks: dict[str, list[list[ChunkClass]]] = {target.name: [] for target in targets}
        self._interrupted = False
        self._rounds_done = 0

    async def take_rounds(self) -> None:
        """Every round at every target; who begins alternates, so that a drift of the machine favours none."""
        gc.collect()
        gc.freeze()  # a collection then looks at this run's objects only, not at every module's
        try:
            for index in range(self.options.rounds):
                order = self._targets if index % 2 == 0 else self._targets[::-1]
                for target in order:
                    await self._take_round(target, index)
                self._rounds_done = index + 1
        except asyncio.CancelledError:
            self._interrupted = True
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
        finally:
            gc.unfreeze()

    async def _take_round(self, target: Target, index: int) -> None:
        self.progress.round_begins(target.name, index, self._workload.num_requests())
        session = Session(
            target.client,
            target=target.name,
            round_index=index,
            limits=SessionLimits(self.options.timeout, self.options.max_in_flight),
            clock=RealClock(),
            on_end=self.progress.request_ended,
        )
        rng = random.Random(f"{self.options.seed}/{index}")
        before = await target.chunks()
        try:
            await self._workload.run(session, target, rng)
        finally:
            await session.interrupt()
            self._records += session.records
        self._chunks[target.name].append(chunks_between(before, await target.chunks()))

    def report(self, started: datetime) -> Report:
        options = self.options
        names = [target.name for target in self._targets]
        records = sorted(self._records, key=lambda record: (record.round, names.index(record.target), record.index))
        groups = [over_rounds(rounds) for rounds in self._group_rounds(records)]
        figures = {name: self._figures(records, name) for name in names}
        check = None
        if options.check_ledger:
            check = {name: check_ledger(r for r in records if r.target == name) for name in names}
        return Report(
            version=_version(),
            started_at=started.isoformat(timespec="seconds"),
            workload=options.workload,
            options=_plain(options),
            targets=[_info(target) for target in self._targets],
            rounds=self._rounds_done,
            interrupted=self._interrupted,
            notes=[*self._workload.notes, *_length_notes(self._targets)],
            groups=groups,
            figures=figures,
            chunks={name: add_chunks(rounds) for name, rounds in self._chunks.items()},
            ratios=ratios(groups, figures, names),
            ledger=check,
            records=records,
        )

    def _group_rounds(self, records: Sequence[RequestRecord]) -> list[list[Any]]:
        slo = SLO(self.options.slo_ttft_ms, self.options.slo_tpot_ms)
        keys = dict.fromkeys((record.group, record.target) for record in records)
        found = []
        for group, target in keys:
            mine = [record for record in records if record.group == group and record.target == target]
            rounds = itertools.groupby(mine, key=lambda record: record.round)
            found.append([summarise(list(of_round), slo) for _, of_round in rounds])
        return found

    def _figures(self, records: Sequence[RequestRecord], name: str) -> dict[str, float]:
        mine = [record for record in records if record.target == name]
        rounds = itertools.groupby(mine, key=lambda record: record.round)
        return median_figures([self._workload.figures(list(of_round)) for _, of_round in rounds])


def _info(target: Target) -> TargetInfo:
    shape = target.maker.shape
    return TargetInfo(
        name=target.name,
        url=target.origin.url,
        model=target.model,
        server=target.server,
        exact_lengths=shape.exact,
        template_tokens=shape.overhead,
    )


def _length_notes(targets: Sequence[Target]) -> list[str]:
    return [
        f"{target.name}: prompt lengths are approximate; its token counts do not add up word by word"
        for target in targets
        if not target.maker.shape.exact
    ]


def _plain(options: BenchOptions) -> dict[str, Any]:
    """The options as JSON can hold them, without the key."""
    hidden = dataclasses.replace(options, api_key=None if options.api_key is None else "(given)")
    values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(hidden, enc_hook=str))
    return values


def _version() -> str:
    try:
        return package_version("headstart")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"
