"""The API process' share of the TTFT ledger, and the ledger as clients see it: `Server-Timing` and the usage object."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.core.step import RequestOutput
from headstart.metrics.ledger import PARTS, Ledger


@dataclass(frozen=True, slots=True)
class Stamps:
    """Moments of one HTTP request, monotonic seconds: its first byte, parsed and rendered, tokenized and submitted."""

    received: float
    parsed: float
    submitted: float

    def ledger(self, source: RequestOutput, written: float, waited: float = 0.0) -> Ledger:
        """All ten parts, in order; they sum to `written - received`. `source` brought the engine's parts; `waited`: how
        long it was held back for another choice of its prompt to go ahead, which counts as `queue`.

        `deliver` is what comes after the engine's parts: from the step's retirement to the write, the wait for the next
        token included where the first ones were no text yet.
        """
        engine = dict(source.ledger)
        if waited:
            engine["queue"] = engine.get("queue", 0.0) + waited
        assert engine.keys() <= set(PARTS), "the engine books parts of the ledger only"
        own = {
            "receive": self.parsed - self.received,
            "tokenize": self.submitted - self.parsed,
            "deliver": written - self.submitted - sum(engine.values()),
        }
        return tuple((part, own[part] if part in own else engine.get(part, 0.0)) for part in PARTS)


def server_timing(ledger: Ledger) -> bytes:
    """The header's value (W3C Server Timing): durations in milliseconds."""
    return ", ".join(f"{part};dur={seconds * 1000:.3f}" for part, seconds in ledger).encode()


def in_milliseconds(ledger: Ledger) -> dict[str, float]:
    return {part: round(seconds * 1000, 3) for part, seconds in ledger}
