"""The trace workload: replays arrivals and lengths, and gives prompts of equal hash ids equal text."""

from __future__ import annotations

import random
from collections.abc import Sequence

from headstart.bench.options import BenchOptions
from headstart.bench.record import RequestRecord
from headstart.bench.session import RequestPlan, Session
from headstart.bench.target import Target
from headstart.bench.traces import TraceRow, read_trace
from headstart.bench.workloads import Figures, send_open_loop


class Trace:
    """Rows are read once; every round and target replays the same ones with fresh words."""

    def __init__(self, options: BenchOptions) -> None:
        assert options.file is not None, "validate() requires it"
        rows = read_trace(
            options.file, shrink=options.shrink, speed=options.speed, limit=options.limit, seed=options.seed
        )
        longest = options.max_prompt_tokens
        self._rows = [row for row in rows if longest is None or row.input_length <= longest]
        left_out = len(rows) - len(self._rows)
        self.notes: tuple[str, ...] = (
            (f"{left_out} of {len(rows)} rows left out: longer than --max-prompt-tokens {longest}",) if left_out else ()
        )

    def num_requests(self) -> int:
        return len(self._rows)

    async def run(self, session: Session, target: Target, rng: random.Random) -> None:
        salt = f"{session.round_index}"
        arrivals = [(row.at, self._plan(target, row, salt)) for row in self._rows]
        lead = session.elapsed()
        await send_open_loop(session, ((lead + at, plan) for at, plan in arrivals))

    def _plan(self, target: Target, row: TraceRow, salt: str) -> RequestPlan:
        return target.plan(
            "trace", prompt_words(target, row, salt), max_tokens=row.output_length, wanted=row.input_length
        )

    def figures(self, records: Sequence[RequestRecord]) -> Figures:
        return {}


def prompt_words(target: Target, row: TraceRow, salt: str) -> list[str]:
    """The row's words: each hash id's own text in turn, cut at the end for what the template adds."""
    maker = target.maker
    num_words = maker.num_words(row.input_length)
    words: list[str] = []
    for name, size in row.blocks:
        words += maker.block(f"{salt}:{name}", size)
    words += maker.unique(max(0, num_words - len(words)))
    return words[:num_words]
