"""What the next step computes. Owns the waiting queue, the running list and every `Request`'s state.

There is no prefill mode and no decode mode: a request has tokens and computed tokens, a step grants some of the rest.
Every running decode gets its token first; what the budget leaves goes to prefills, half-done and waiting ones alike, in
the policy's order (chunked prefill: Agrawal et al., Sarathi-Serve, OSDI 2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

from headstart.config import SchedulerConfig
from headstart.core.budget import StepBudget
from headstart.core.cost import CostModel, StepWork
from headstart.core.kv_cache_manager import KVCacheManager
from headstart.core.loads import Loads
from headstart.core.pending_prefixes import PendingPrefixes
from headstart.core.policy import FirstComeFirstServed, make_policy
from headstart.core.request import Request, RequestStatus
from headstart.core.schedule import Schedule, make_chunk, work_of_decodes
from headstart.core.step import NewRequestData, ScheduledChunk
from headstart.core.waiting_queue import WaitingQueue

# Waiting requests whose cached length is looked up again each step: it changes when others finish or are evicted.
_REFRESHED_PER_STEP = 1
# Tokens in common with a prompt that is being computed from which on it pays to wait for them: to compute fewer beside
# it costs less than the step that the waiter's first token would come later.
_MIN_SHARED_TOKENS = 64
_SET_ASIDE_PER_STEP = 16  # each is compared with the prompts that are being computed, token by token


@dataclass(frozen=True, slots=True)
class View:
    """What a newcomer would find: its cached tokens, who goes before it, and who decodes.

    `num_held_blocks` are in the cache; `num_cached_tokens` count those, too, that it would load in `load_seconds`.
    Of the `num_ahead` that go before it `num_seated_ahead` run already. `loading` will go before it, too: seconds until
    their loads are over, and of prefill that is left then. `answers`: of each request that runs or loads, the tokens
    of its answer so far and the most that are left.
    """

    num_held_blocks: int
    num_cached_tokens: int
    load_seconds: float
    num_ahead: int
    num_seated_ahead: int
    seconds_ahead: float
    loading: list[tuple[float, float]]
    decodes: StepWork
    answers: list[tuple[int, int]]


class Scheduler:
    """Args: `max_model_len` in tokens, prompt and answer together."""

    def __init__(
        self, config: SchedulerConfig, costs: CostModel, kv: KVCacheManager, *, loads: Loads | None, max_model_len: int
    ) -> None:
        self._config = config
        self._costs = costs
        self._kv = kv
        self._loads = loads
        self._max_model_len = max_model_len
        self._policy = make_policy(config)
        self._arrival_order = FirstComeFirstServed(config)
        self._waiting = WaitingQueue()
        self._pending = PendingPrefixes(block_size=kv.block_size, min_tokens=_MIN_SHARED_TOKENS)
        # Running requests, by whether the chunk that ends their prefill was granted.
        self._prefilling: dict[str, Request] = {}
        self._decoding: dict[str, Request] = {}
        self._first_in_flight = 0  # steps before this one have retired

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_loading(self) -> int:
        return 0 if self._loads is None else len(self._loads)

    def add(self, request: Request) -> None:
        """Queue a request that was viewed (`view_of`) just before."""
        self._waiting.push(request, request.key)

    def remove(self, request: Request) -> None:
        """The request is over: it leaves its list and lets go of its blocks. The caller sets its status."""
        if request.status in (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_KV):
            self._leave(request)
        else:
            self._waiting.remove(request)

    def retire(self, step_id: int) -> None:
        """The oldest step in flight is done."""
        self._first_in_flight = step_id + 1

    def schedule(self, step_id: int, now: float) -> Schedule:
        """Grant the next step's chunks and change the requests accordingly. No chunks: nothing can run now."""
        step = Schedule(step_id)
        if self._loads is not None and len(self._loads):
            self._end_loads(self._loads, step, now)
        self._schedule_decodes(step)
        num_decodes = step.num_decodes = len(step.chunks)
        budget = StepBudget(
            self._costs,
            work_of_decodes([chunk.start for chunk in step.chunks]),
            seconds=(self._config.slo_tpot_ms if num_decodes else self._config.max_chunk_ms) / 1000,
            tokens=self._config.max_num_batched_tokens - num_decodes,
        )
        # Who was just preempted for want of blocks must not take them back in the same step.
        self._schedule_prefills(step, budget, now, admit=not step.preempted)
        step.new_requests = tuple(
            self._introduce(request) for request in step.requests[num_decodes:] if not request.known_to_worker
        )
        return step

    def view_of(self, request: Request, now: float) -> View:
        """The queue as a request that was not added yet would find it; gives it the key that it would have."""
        num_matched = len(self._kv.match(request))
        num_loadable, load_seconds = self._look_up(request, num_matched)
        half_done = [
            (self._prefill_key(other), self._costs.prefill_seconds(other.num_computed_tokens, num_left))
            for other in self._prefilling.values()
            if (num_left := other.num_remaining_tokens) > 0
        ]
        loading = [] if self._loads is None else self._loads.outlook(now)
        backlog = self._waiting.seconds + sum([seconds for _, seconds in half_done])
        backlog += sum([rest for _, _, rest in loading])
        request.turn = request.spec.arrival_time + backlog
        request.key = self._place(request, num_matched)
        num_ahead, seconds_ahead = self._waiting.ahead_of(request.spec.tenant, request.key, request.prefill_seconds)
        seated_ahead = [seconds for key, seconds in half_done if key < request.key]
        answers = [
            (other.num_tokens - other.num_prompt_tokens, other.max_num_tokens - other.num_tokens)
            for other in (*self._decoding.values(), *self._prefilling.values(), *(other for other, *_ in loading))
        ]
        return View(
            num_held_blocks=num_matched,
            num_cached_tokens=(num_matched + num_loadable) * self._kv.block_size,
            load_seconds=load_seconds,
            num_ahead=num_ahead + len(seated_ahead),
            num_seated_ahead=len(seated_ahead),
            seconds_ahead=seconds_ahead + sum(seated_ahead),
            loading=[(left, rest) for other, left, rest in loading if self._prefill_key(other) < request.key],
            decodes=work_of_decodes([other.num_computed_tokens for other in self._decoding.values()]),
            answers=answers,
        )

    def behind(self, request: Request, now: float) -> list[tuple[Request, float]]:
        """Who has no token yet and would go after this one, which has its key; and seconds until its load is over."""
        half_done = [(other, 0.0) for other in self._prefilling.values() if other.num_remaining_tokens > 0]
        loading = [] if self._loads is None else [(other, left) for other, left, _ in self._loads.outlook(now)]
        seated = [entry for entry in (*half_done, *loading) if self._prefill_key(entry[0]) >= request.key]
        return [*seated, *((other, 0.0) for other in self._waiting.behind(request.spec.tenant, request.key))]

    def _schedule_decodes(self, step: Schedule) -> None:
        size = self._kv.block_size
        num_held_back = 0
        running = RequestStatus.RUNNING
        step_id = step.step_id
        take, grant, make, kind = step.requests.append, step.chunks.append, make_chunk, ScheduledChunk
        for request in list(self._decoding.values()):
            start, num_blocks = request.num_computed_tokens, len(request.block_table)
            if start + 1 >= request.max_num_tokens or request.status is not running:
                continue  # what is in flight ends it, or it was just preempted
            if start < num_blocks * size and request.num_sent_blocks == num_blocks:
                # As `Schedule.grant` does it, without a call: most requests, in every step.
                request.num_computed_tokens = start + 1
                request.last_step = step_id
                take(request)
                grant(make(kind, (request.request_id, start, 1, num_blocks, (), True)))
                continue
            while start >= len(request.block_table) * size and not self._kv.allocate_one(request):
                if self._kv.num_releasing_blocks > num_held_back:
                    num_held_back += 1  # steps in flight will give it one: no further victim is needed
                    break
                victim = self._victim(step)
                self._preempt(victim)
                step.preempted.append(victim)
                if victim is request:
                    break
            else:
                step.grant(request, start, 1, True)

    def _victim(self, step: Schedule) -> Request:
        """Who gives up its blocks: the last in order of arrival and priority that this step has granted nothing yet."""
        granted = {request.request_id for request in step.requests}
        loading: Iterable[Request] = () if self._loads is None else self._loads.requests()
        running = (*self._decoding.values(), *self._prefilling.values(), *loading)
        candidates = (request for request in running if request.request_id not in granted)
        return max(candidates, key=lambda request: (self._arrival_order.key(request.spec, 0, 0), request.request_id))

    def _leave(self, request: Request) -> None:
        """A request that has blocks lets go of them, and stops running or loading."""
        if request.status is RequestStatus.WAITING_FOR_KV:
            assert self._loads is not None
            self._loads.cancel(request)
        else:
            running = self._decoding if request.request_id in self._decoding else self._prefilling
            del running[request.request_id]
        self._pending.ended(request)
        self._kv.release(request)

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        # At the head of its class: behind nobody who arrived later.
        self._waiting.push(request, self._arrival_order.key(request.spec, 0, 0))

    def _schedule_prefills(self, step: Schedule, budget: StepBudget, now: float, *, admit: bool) -> None:
        for request in self._pending.take_ready():
            self._waiting.bring_back(request)
        self._refresh_keys()
        for request in self._prefills_in_order(step, now, admit):
            start, wanted = request.num_computed_tokens, request.num_remaining_tokens
            count = budget.chunk(start, wanted, self._kv.block_size, request.samples)
            if count == 0:
                return
            samples = count == wanted and request.samples
            step.grant(request, start, count, samples)
            budget.spend(start, count, samples)
            if samples:
                self._decoding[request.request_id] = self._prefilling.pop(request.request_id)

    def _prefills_in_order(self, step: Schedule, now: float, admit: bool) -> Iterator[Request]:
        """Half-done prefills and, admitted as they come up, waiting requests: those that hold their blocks already.

        Who computes what a waiting request waits for goes at that one's place, if it is the earlier one.
        """
        half_done: list[tuple[float, str, Request | None]] = [
            (self._prefill_key(request), request.request_id, request)
            for request in self._prefilling.values()
            if request.num_remaining_tokens > 0  # else what is in flight ends it
        ]
        half_done.sort(key=itemgetter(0, 1))
        num_set_aside, step_id = 0, step.step_id
        for key, _, request in (*half_done, (math.inf, "", None)):
            while admit and (first := self._waiting.peek()) is not None and first.key < key:
                if not self._may_admit(first):
                    admit = False
                    break
                matched = self._kv.match(first)
                owner = self._owner_of_prefix(first, matched)
                if owner is None:
                    admit = self._try_admit(first, matched, step, now)
                    if first.status is RequestStatus.RUNNING:
                        yield first
                    continue
                num_set_aside += 1
                admit = num_set_aside < _SET_ASIDE_PER_STEP
                if owner.last_step < step_id and owner.request_id in self._prefilling:
                    yield owner
            if request is not None and request.last_step < step_id:
                yield request

    def _prefill_key(self, request: Request) -> float:
        lent = self._pending.lent_key(request)
        return request.key if lent is None else min(request.key, lent)

    def _owner_of_prefix(self, request: Request, matched: list[int]) -> Request | None:
        """Who computes what this waiting request needs next; if somebody does, it is set aside until then."""
        if not self._kv.matches(request):
            return None
        owner = self._pending.wait_for_owner(request, matched)
        if owner is not None:
            self._waiting.set_aside(request)
        return owner

    def _may_admit(self, request: Request) -> bool:
        """There is a place, and no step in flight names the request (it was preempted)."""
        return (
            self.num_running + self.num_loading < self._config.max_num_seqs
            and request.last_step < self._first_in_flight
        )

    def _try_admit(self, request: Request, matched: list[int], step: Schedule, now: float) -> bool:
        """Start the first waiting request, or put it back where it belongs now. False: nobody can be admitted now."""
        num_loadable, _ = self._look_up(request, len(matched))
        if request.status is RequestStatus.WAITING:
            key = self._place(request, len(matched))
            if key > request.key:  # part of what it would have hit was evicted
                self._waiting.rekey(request, key)
                return True
        # A spare block for each running request, lest the newcomer be preempted for the next decode's sake.
        if not self._kv.allocate_prompt(request, matched, spare=self.num_running + self.num_loading):
            return False
        self._waiting.charge(request)
        self._waiting.remove(request)
        if num_loadable:
            assert self._loads is not None
            request.status = RequestStatus.WAITING_FOR_KV
            self._loads.start(request, len(matched), num_loadable, now)
            step.began_loading.append(request)
            self._pending.started(request)
        else:
            self._run(request)
        return True

    def _run(self, request: Request) -> None:
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
        request.status = RequestStatus.RUNNING
        self._prefilling[request.request_id] = request
        self._pending.started(request)

    def _look_up(self, request: Request, num_matched: int) -> tuple[int, float]:
        """Blocks that the request would load behind those that it matches, and the seconds that takes."""
        if self._loads is None or not self._kv.matches(request):
            return 0, 0.0
        self._loads.find(request, num_matched)
        return self._loads.plan(request, num_matched)

    def _end_loads(self, loads: Loads, step: Schedule, now: float) -> None:
        """Whoever's blocks are there, or will not be there in time, runs from now on."""
        for load in loads.take_over(now):
            request, end = load.request, load.first + load.num_arrived
            wanted = request.block_table[load.first : end]
            request.num_computed_tokens = end * self._kv.block_size
            self._kv.index(request, request.num_computed_tokens)
            # Where another request computed the same block meanwhile, that one stands.
            now_there = request.block_table[load.first : end]
            loads.fill(load, [old if old == new else -1 for old, new in zip(wanted, now_there, strict=True)])
            self._run(request)
            step.loaded.append(load)

    def _refresh_keys(self) -> None:
        for _ in range(min(_REFRESHED_PER_STEP, len(self._waiting))):
            request = self._waiting.rotate()
            if request is not None and request.status is RequestStatus.WAITING:
                self._waiting.rekey(request, self._key(request))

    def _key(self, request: Request) -> float:
        return self._place(request, len(self._kv.match(request)))

    def _place(self, request: Request, num_matched: int) -> float:
        """A request's key with so many cached blocks; keeps what its prefill is predicted to take."""
        num_loadable = 0 if self._loads is None else self._loads.plan(request, num_matched)[0]
        num_cached = (num_matched + num_loadable) * self._kv.block_size
        request.prefill_seconds = self._costs.prefill_seconds(num_cached, request.num_tokens - num_cached)
        return self._policy.key(request.spec, request.turn, request.prefill_seconds)

    def _introduce(self, request: Request) -> NewRequestData:
        request.known_to_worker = True
        spec = request.spec
        return NewRequestData(spec.request_id, spec.prompt_token_ids, spec.params)

    def check_invariants(self) -> None:
        aside = self._pending.waiting()
        assert len({request.request_id for request in aside}) == len(aside)
        assert all(request.ticket == 0 for request in aside)
        self._waiting.check_invariants()
        assert aside or self._waiting.peek() is not None or not len(self._waiting), "a waiting request was lost"
        assert not self._prefilling.keys() & self._decoding.keys()
        for request in self._decoding.values():
            assert request.num_remaining_tokens <= 1
        for request in (*self._prefilling.values(), *self._decoding.values()):
            assert request.status is RequestStatus.RUNNING
            assert request.ticket == 0
            in_flight = request.last_step >= self._first_in_flight
            assert in_flight or request.num_computed_tokens <= request.num_tokens
            assert len(request.block_table) * self._kv.block_size >= request.num_computed_tokens
        assert self.num_running + self.num_loading <= self._config.max_num_seqs
        if self._loads is not None:
            self._loads.check_invariants()
            assert all(request.status is RequestStatus.WAITING_FOR_KV for request in self._loads.requests())
