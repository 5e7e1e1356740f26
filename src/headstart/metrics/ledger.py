"""The TTFT ledger, engine side: from the core's events, where the time from submission to the first token went.

The parts are differences of consecutive moments, so they sum exactly to the time from `submit_time` to the first token.
The API process puts `receive` and `tokenize` before them and `deliver` after them (design, section 5).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headstart.core.events import (
    Event,
    LoadBegan,
    LoadEnded,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepRetired,
)

PARTS = (
    "receive",  # parse the request, render the template
    "tokenize",
    "admit",  # hand-over to the engine
    "queue",  # before its first chunk
    "load",  # KV from a tier, the part not hidden
    "prefill",  # its share of the steps it was in
    "interference",  # the rest of those steps, and the gaps between its chunks
    "transfer",  # KV between replicas, the part not hidden
    "sample",
    "deliver",  # from the engine to the socket
)
Ledger = tuple[tuple[str, float], ...]


@dataclass(slots=True)
class _Account:
    cursor: float  # everything before this moment is booked
    admit: float
    queue: float = 0.0
    load: float = 0.0
    prefill: float = 0.0
    interference: float = 0.0
    sample: float = 0.0
    started: bool = False

    def book_load(self, now: float, *, waited: bool) -> None:
        """A load begins or, `waited`, ends now."""
        if waited:
            self.load += now - self.cursor
        elif self.started:
            self.interference += now - self.cursor
        else:
            self.queue += now - self.cursor
        self.cursor = now


class LedgerBook:
    """One account for each request that awaits its first token."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._finished: list[str] = []
        self._last_retirement = float("-inf")

    def __len__(self) -> int:
        return len(self._accounts)

    def observe(self, events: Iterable[Event]) -> None:
        """Book what happened. Accounts of requests that finished stay open for `take` until the next call."""
        for request_id in self._finished:
            self._accounts.pop(request_id, None)
        self._finished.clear()
        for event in events:
            match event:
                case RequestAdded():
                    self._accounts[event.request_id] = _Account(event.time, admit=event.time - event.submit_time)
                case StepRetired():
                    for request_id, share in event.shares:
                        account = self._accounts.get(request_id)
                        if account is not None:
                            self._book(account, event, share)
                    self._last_retirement = event.time
                case LoadBegan() | LoadEnded():
                    account = self._accounts.get(event.request_id)
                    if account is not None:
                        account.book_load(event.time, waited=isinstance(event, LoadEnded))
                case RequestFinished():
                    self._finished.append(event.request_id)
                case RequestPreempted():
                    pass  # until it runs again, its time is booked as a gap between chunks

    def take(self, request_id: str) -> Ledger:
        """Close the account and return its parts in seconds; empty when there is none (any more)."""
        account = self._accounts.pop(request_id, None)
        if account is None:
            return ()
        load = (("load", account.load),) if account.load else ()  # most requests load nothing
        return (
            ("admit", account.admit),
            ("queue", account.queue),
            *load,
            ("prefill", account.prefill),
            ("interference", account.interference),
            ("sample", account.sample),
        )

    def _book(self, account: _Account, step: StepRetired, share: float) -> None:
        begin = max(step.begin_time, account.cursor)
        start = min(max(begin, self._last_retirement), step.time)  # with two steps in flight: after the one before
        if account.started:
            account.interference += start - account.cursor
        else:
            account.queue += begin - account.cursor
            account.interference += start - begin
            account.started = True
        # Only the step that ends the prefill samples for this request; in the others that part is the others' work.
        sample = min(step.sample_seconds, step.time - start)
        compute = step.time - start - sample
        account.prefill += share * compute
        account.interference += (1 - share) * compute + account.sample
        account.sample = sample
        account.cursor = step.time
