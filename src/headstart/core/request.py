"""A request: what the caller asked for (frozen) and where it stands (mutable, owned by the scheduler)."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    WAITING_FOR_KV = "waiting_for_kv"  # it has its blocks; some of their content is being loaded
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    STOP = "stop"  # a stop token
    LENGTH = "length"  # max_tokens or the context
    ABORT = "abort"  # the client went away, or the server is stopping
    ERROR = "error"  # this request could not be computed


_SAMPLING_RANGES = (
    ("max_tokens", 0, 2**31),
    ("temperature", 0.0, 1e6),
    ("top_k", 0, 2**31),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 1e3),
    ("presence_penalty", -1e3, 1e3),
    ("frequency_penalty", -1e3, 1e3),
    ("seed", 0, 2**64 - 1),
    ("logprobs", 0, 2**31),
    ("prompt_logprobs", 0, 2**31),
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Every field is settled: whoever makes one has applied defaults and limits.

    Raises `ValueError` naming the field for a value that means nothing.

    `temperature == 0` is greedy. `top_k == 0`, `top_p == 1`, `min_p == 0` and the neutral penalties mean "off".
    `seed` is always set; the n-th sampled token of a request depends on `(seed, n)` and its logits only.
    `logprobs`: None for none, 0 for the sampled token's alone, k for the k most likely ones too.
    `stop_token_ids` holds the model's end-of-sequence ids too, unless the caller ignores them.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no sampler can do, where it is made: beyond this point it would cost others their engine."""
        for name, low, high in _SAMPLING_RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # also refuses NaN
                raise ValueError(f"{name} is {value}; it must be from {low:g} to {high:g}")
        if self.repetition_penalty == 0:
            raise ValueError("repetition_penalty is 0; it must be greater than 0 (1 turns it off)")
        if self.top_p == 0:
            raise ValueError("top_p is 0; it must be greater than 0 (for the most likely token only: temperature=0)")


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as it crosses from the API process to the engine process.

    `arrival_time`: seconds of the monotonic clock at which the server received it; `submit_time`: when it was handed to
    the engine (the ledger's `admit` runs from there; 0 means at arrival). `priority`: lower goes first. `cache_salt`:
    requests share cached blocks only with requests of the same salt. `reserved`: its place was kept for it beforehand,
    so the queue's limit does not refuse it. `tenant`: whose it is; tenants share an overloaded engine evenly.
    `slo_ttft`: seconds after its arrival within which its first token is due; None: no promise is asked for.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_time: float
    priority: int = 0
    cache_salt: str = ""
    submit_time: float = 0.0
    reserved: bool = False
    tenant: str = ""
    slo_ttft: float | None = None


@dataclass(slots=True, eq=False)
class Request:
    """A request's state in the core. Owner: `Scheduler`. Counts are in tokens.

    `num_computed_tokens` counts what steps already *granted* (in flight included) compute.
    """

    spec: EngineRequest
    max_num_tokens: int  # prompt and answer: where max_tokens or the context ends it
    token_ids: list[int] = field(init=False)  # prompt, then what was generated
    request_id: str = field(init=False)
    num_prompt_tokens: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prefix hit at first admission
    last_step: int = -1  # the last step that names this request
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0  # prompt log-probabilities already reported
    block_table: list[int] = field(default_factory=list)
    num_indexed_blocks: int = 0  # leading entries of block_table that are nodes of the radix cache
    num_sent_blocks: int = 0  # leading entries of block_table that the worker knows
    known_to_worker: bool = False
    has_token: bool = False  # its first token was reported
    key: float = 0.0  # place in the policy's order; lower goes first
    turn: float = 0.0  # when its prefill would have begun, first come, first served, as predicted on its arrival
    prefill_seconds: float = 0.0  # of its uncached prompt, as predicted when it got its place
    added_time: float = 0.0  # when it was added
    forecast_time: float = 0.0  # when its first token was predicted for then
    expected_time: float = 0.0  # the same, put off by those who were let in before it
    block_names: tuple[bytes, ...] | None = None  # of its prompt's whole blocks; None: nobody asked
    num_stored_blocks: int = 0  # leading blocks that were cached or could be loaded when that was last looked up
    ticket: int = 0  # which of its entries in the waiting queue is the valid one

    def __post_init__(self) -> None:
        self.token_ids = list(self.spec.prompt_token_ids)
        self.request_id = self.spec.request_id
        self.num_prompt_tokens = len(self.spec.prompt_token_ids)
        self.stop_token_ids = frozenset(self.spec.params.stop_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def samples(self) -> bool:
        """It is to yield tokens at all (`max_tokens` may be 0)."""
        return self.max_num_tokens > self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens that no step was granted yet."""
        return len(self.token_ids) - self.num_computed_tokens
