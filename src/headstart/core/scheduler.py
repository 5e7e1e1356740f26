"""What the next step computes. Owns the waiting queue, the running list and every `Request`'s state.

There is no prefill mode and no decode mode: a request has tokens and computed tokens, a step grants some of the rest.
Every running decode gets its token first; what the budget leaves goes to prefills, half-done and waiting ones alike, in
the policy's order (chunked prefill: Agrawal et al., Sarathi-Serve, OSDI 2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headstart.config import SchedulerConfig
from headstart.core.budget import StepBudget, work_of
from headstart.core.kv_cache_manager import KVCacheManager
from headstart.core.policy import FirstComeFirstServed, make_policy
from headstart.core.request import Request, RequestStatus
from headstart.core.step import NewRequestData, ScheduledChunk
from headstart.core.waiting_queue import WaitingQueue

# Waiting requests whose cached length is looked up again each step: it changes when others finish or are evicted.
_REFRESHED_PER_STEP = 4


@dataclass(frozen=True, slots=True)
class Grant:
    """One chunk with its owner: what `EngineCore` needs when the step retires."""

    request: Request
    chunk: ScheduledChunk
    work: float  # token equivalents
    num_preemptions: int  # of the request when granted: if it rose since, the chunk's blocks are gone


@dataclass(frozen=True, slots=True)
class Schedule:
    grants: tuple[Grant, ...]
    new_requests: tuple[NewRequestData, ...]
    preempted: tuple[Request, ...]


class Scheduler:
    """Args: `max_model_len` in tokens, prompt and answer together."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, *, max_model_len: int) -> None:
        self._config = config
        self._kv = kv
        self._max_model_len = max_model_len
        self._policy = make_policy(config)
        self._arrival_order = FirstComeFirstServed(config)
        self._waiting = WaitingQueue()
        self._running: dict[str, Request] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, request: Request) -> None:
        self._waiting.push(request, self._key(request))

    def remove(self, request: Request) -> None:
        """The request is over: it leaves its list and lets go of its blocks. The caller sets its status."""
        if request.status is RequestStatus.RUNNING:
            del self._running[request.request_id]
            self._kv.release(request)
        else:
            self._waiting.remove(request)

    def schedule(self) -> Schedule:
        """Grant the next step's chunks and change the requests accordingly. Empty grants: nothing can run now."""
        grants: list[Grant] = []
        preempted: list[Request] = []
        self._schedule_decodes(grants, preempted)
        num_decodes = len(grants)
        work = self._config.mixed_step_tokens if num_decodes else self._config.max_num_batched_tokens
        budget = StepBudget(
            work=work,
            tokens=self._config.max_num_batched_tokens - num_decodes,
            horizon=self._config.attention_horizon,
        )
        # Who was just preempted for want of blocks must not take them back in the same step.
        self._schedule_prefills(grants, budget, admit=not preempted)
        new_requests = tuple(self._introduce(grant.request) for grant in grants if not grant.request.known_to_worker)
        return Schedule(tuple(grants), new_requests, tuple(preempted))

    def _schedule_decodes(self, grants: list[Grant], preempted: list[Request]) -> None:
        for request in list(self._running.values()):
            if request.status is not RequestStatus.RUNNING or not self._wants_decode(request):
                continue
            while not self._kv.allocate_decode(request):
                victim = self._victim(grants)
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            else:
                grants.append(self._grant(request, 1))

    def _wants_decode(self, request: Request) -> bool:
        """A further token may be sampled once those in flight are: neither the answer nor the context is full."""
        num_outputs = request.num_output_tokens + request.num_pending_tokens
        num_tokens = request.num_tokens + request.num_pending_tokens
        return request.is_decoding and num_outputs < request.spec.params.max_tokens and num_tokens < self._max_model_len

    def _victim(self, grants: list[Grant]) -> Request:
        """Who gives up its blocks: the last in order of arrival and priority that this step has granted nothing yet."""
        granted = {grant.request.request_id for grant in grants}
        candidates = (request for request in self._running.values() if request.request_id not in granted)
        return max(candidates, key=lambda request: (self._arrival_order.key(request.spec, 0), request.request_id))

    def _preempt(self, request: Request) -> None:
        del self._running[request.request_id]
        self._kv.release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        # At the head of its class: behind nobody who arrived later.
        self._waiting.push(request, self._arrival_order.key(request.spec, 0))

    def _schedule_prefills(self, grants: list[Grant], budget: StepBudget, *, admit: bool) -> None:
        self._refresh_keys()
        for request in self._prefills_in_order(admit):
            count = budget.chunk(request.num_computed_tokens, request.num_remaining_tokens, self._kv.block_size)
            if count == 0:
                return
            start = request.num_computed_tokens
            grants.append(self._grant(request, count))
            budget.spend(start, count)

    def _prefills_in_order(self, admit: bool) -> Iterator[Request]:
        """Half-done prefills and, admitted as they come up, waiting requests: those that hold their blocks already."""
        half_done = [
            (self._policy.key(request.spec, request.num_remaining_tokens), request.request_id, request)
            for request in self._running.values()
            if request.num_remaining_tokens > 0 and not request.is_decoding
        ]
        half_done.sort()
        for key, _, request in half_done:
            while admit and (first := self._waiting.peek()) is not None and first.key < key:
                admit = self._try_admit(first)
                if admit and first.status is RequestStatus.RUNNING:
                    yield first
            yield request
        while admit and (first := self._waiting.peek()) is not None:
            admit = self._try_admit(first)
            if admit and first.status is RequestStatus.RUNNING:
                yield first

    def _try_admit(self, request: Request) -> bool:
        """Start the first waiting request, or put it back where it belongs now. False: nobody can be admitted now."""
        if len(self._running) >= self._config.max_num_seqs or request.num_in_flight > 0:
            return False
        matched = self._kv.match(request)
        if request.status is RequestStatus.WAITING:
            key = self._policy.key(request.spec, request.num_tokens - len(matched) * self._kv.block_size)
            if key > request.key:  # part of what it would have hit was evicted
                self._waiting.rekey(request, key)
                return True
        # A spare block for each running request, lest the newcomer be preempted for the next decode's sake.
        if not self._kv.allocate_prompt(request, matched, spare=len(self._running)):
            return False
        self._waiting.remove(request)
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
        request.status = RequestStatus.RUNNING
        self._running[request.request_id] = request
        return True

    def _refresh_keys(self) -> None:
        for _ in range(min(_REFRESHED_PER_STEP, len(self._waiting))):
            request = self._waiting.rotate()
            if request is not None and request.status is RequestStatus.WAITING:
                self._waiting.rekey(request, self._key(request))

    def _key(self, request: Request) -> float:
        num_cached = len(self._kv.match(request)) * self._kv.block_size
        return self._policy.key(request.spec, request.num_tokens - num_cached)

    def _grant(self, request: Request, count: int) -> Grant:
        start = request.num_computed_tokens
        sent = request.num_sent_blocks
        samples = count == request.num_remaining_tokens and request.spec.params.max_tokens > 0
        chunk = ScheduledChunk(
            request_id=request.request_id,
            start=start,
            num_scheduled_tokens=count,
            block_offset=sent,
            block_ids=tuple(request.block_table[sent:]),
            samples=samples,
        )
        request.num_sent_blocks = len(request.block_table)
        request.num_computed_tokens += count
        request.num_pending_tokens += samples
        request.num_in_flight += 1
        work = work_of(start, count, self._config.attention_horizon)
        return Grant(request, chunk, work, request.num_preemptions)

    def _introduce(self, request: Request) -> NewRequestData:
        request.known_to_worker = True
        spec = request.spec
        return NewRequestData(spec.request_id, spec.prompt_token_ids, spec.params)

    def check_invariants(self) -> None:
        for request in self._running.values():
            assert request.status is RequestStatus.RUNNING
            assert request.ticket == 0
            assert request.num_computed_tokens <= request.num_tokens + request.num_pending_tokens
            assert len(request.block_table) * self._kv.block_size >= request.num_computed_tokens
        assert len(self._running) <= self._config.max_num_seqs
