"""Facts that leave the core, in order, for the ledger and the metrics. Times are the `now` that was passed in."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.core.cost import StepWork


@dataclass(frozen=True, slots=True)
class RequestAdded:
    request_id: str
    arrival_time: float
    submit_time: float
    time: float


@dataclass(frozen=True, slots=True)
class StepRetired:
    """A step's result was taken in.

    `shares` names the requests in it that had no token yet, each with its share of the step's work (sum at most 1, in
    token equivalents); a share of 0 does not occur. `begin_time` is when the step was scheduled; `seconds` is how long
    it took by itself (since then, or since the step before it retired), and `predicted_seconds` what that was thought
    to be.
    """

    step_id: int
    begin_time: float
    time: float
    sample_seconds: float
    num_scheduled_tokens: int
    shares: tuple[tuple[str, float], ...]
    work: StepWork
    seconds: float
    predicted_seconds: float


@dataclass(frozen=True, slots=True)
class LoadBegan:
    """A request waits for KV from elsewhere from now on."""

    request_id: str
    time: float


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """It waits no longer. Of `num_wanted_blocks`, the first `num_blocks` arrived; it goes on with those."""

    request_id: str
    time: float
    num_blocks: int
    num_wanted_blocks: int


@dataclass(frozen=True, slots=True)
class RequestPreempted:
    request_id: str
    time: float


@dataclass(frozen=True, slots=True)
class RequestFinished:
    request_id: str
    time: float


Event = RequestAdded | StepRetired | LoadBegan | LoadEnded | RequestPreempted | RequestFinished
