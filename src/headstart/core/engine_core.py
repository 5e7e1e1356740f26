"""The pure engine: requests in, steps out, results in, outputs out. No clock, no threads, no tensors, no sockets.

Life of a step: `begin_step(now)` grants chunks, somebody computes them, `finish_step(output, now)` takes the result in.
Up to `pipeline_depth` steps are in flight at once; they retire in order. With two in flight an end-of-sequence is seen
one step late: the extra token is dropped, and blocks return to the pool only when the steps that may name them retired.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields

from headstart.config import SchedulerConfig
from headstart.core.connector import KVArrival, KVConnector
from headstart.core.cost import CostModel
from headstart.core.errors import DuplicateRequest, EmptyPrompt, QueueFull, RequestTooLong
from headstart.core.events import (
    Event,
    LoadBegan,
    LoadEnded,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
)
from headstart.core.eviction import AgedFrequency
from headstart.core.forecast import Forecast
from headstart.core.kv_cache_manager import KVCacheManager
from headstart.core.loads import Loads
from headstart.core.promises import Promises
from headstart.core.request import EngineRequest, FinishReason, Request, RequestStatus
from headstart.core.schedule import Schedule
from headstart.core.scheduler import Scheduler
from headstart.core.stats import CoreCounters, CoreStats
from headstart.core.step import (
    BlockSave,
    ChunkOutput,
    ModelOutput,
    RequestOutput,
    ScheduledChunk,
    SchedulerOutput,
    TokenLogprob,
)
from headstart.core.steps_in_flight import StepsInFlight

_FINISHED, _RUNNING = RequestStatus.FINISHED, RequestStatus.RUNNING
# Tuple's own constructor, three times as fast as the named tuple's: outputs are made for every request in every step.
_make_output: Callable[[type[RequestOutput], tuple[object, ...]], RequestOutput] = tuple.__new__


class EngineCore:
    """Args: `num_blocks` and `block_size` (tokens) of the KV pool; `max_model_len` in tokens, at most what it holds.

    `costs` predicts steps, and hears of each that ran. `connector`: where blocks that left the cache can be had again.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        costs: CostModel,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        prefix_cache: bool,
        connector: KVConnector | None = None,
    ) -> None:
        if max_model_len > num_blocks * block_size:
            raise ValueError(
                f"a context of {max_model_len} tokens does not fit the KV pool of {num_blocks * block_size} tokens; "
                f"lower max_model_len or give the pool more memory"
            )
        self._config = config
        self._depth = config.pipeline_depth or 1
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_model_len = max_model_len
        horizon = math.inf if config.attention_horizon is None else config.attention_horizon
        self._kv = KVCacheManager(
            num_blocks=num_blocks,
            block_size=block_size,
            prefix_cache=prefix_cache,
            eviction=AgedFrequency(num_blocks=num_blocks, horizon=horizon / block_size),
            saves=connector is not None,
        )
        self._connector = connector
        self._loads = None if connector is None else Loads(connector, costs, block_size=block_size)
        self._scheduler = Scheduler(config, costs, self._kv, loads=self._loads, max_model_len=max_model_len)
        self._requests: dict[str, Request] = {}
        self._counters = CoreCounters()
        self._in_flight = StepsInFlight(costs, self._counters, horizon=horizon)
        self._promises = Promises(config, costs, self._kv, self._scheduler)
        self._next_step_id = 0
        self._forgettable: list[str] = []  # finished requests that the worker still knows
        self._outputs: list[RequestOutput] = []
        self._events: list[Event] = []

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """A request is alive, a step is in flight, or the worker holds state of finished requests."""
        return bool(self._requests or self._in_flight or self._forgettable)

    def add_request(self, spec: EngineRequest, now: float) -> None:
        """Queue a request. Raises a `RequestRefused`, with nothing changed, when it can never run, may not wait, or
        would not keep its SLO, or let others keep theirs, where such are to be refused."""
        self._check_length(spec)
        if spec.request_id in self._requests:
            raise DuplicateRequest(spec.request_id)
        if not spec.reserved and self._scheduler.num_waiting >= self._config.max_num_waiting:
            raise QueueFull(self._scheduler.num_waiting, self._config.max_num_waiting)
        request = self._make_request(spec)
        self._promises.make(request, now, self._in_flight.seconds_left(now))
        self._requests[spec.request_id] = request
        self._scheduler.add(request)
        self._events.append(
            RequestAdded(spec.request_id, spec.arrival_time, spec.submit_time or spec.arrival_time, now)
        )

    def estimate(self, spec: EngineRequest, now: float) -> Forecast:
        """What `add_request` would predict now; nothing is added. Raises `RequestRefused` for what can never run."""
        self._check_length(spec)
        return self._promises.forecast(self._make_request(spec), now, self._in_flight.seconds_left(now))

    def abort(self, request_id: str, now: float) -> None:
        """End a request in whatever state it is; an id that is not alive is ignored (it may have just finished)."""
        request = self._requests.get(request_id)
        if request is not None:
            self._counters.aborts += 1
            self._outputs.append(self._finish(request, FinishReason.ABORT, now))

    def kv_arrived(self, arrival: KVArrival) -> None:
        """News of a load; whoever waited for it is in the next step that is begun."""
        if self._loads is not None:
            self._loads.arrived(*arrival)

    def next_check(self) -> float | None:
        """When `begin_step` is to be called at the latest although nothing happens: a load may have fallen behind."""
        return None if self._loads is None else self._loads.next_check()

    def cached_blocks(self) -> list[BlockSave]:
        """All of the prefix cache that is surely there, that first which is worth most.

        For who keeps it beyond the process' end: what a step in flight fills in may be nowhere, for it may never run.
        """
        if self._loads is None:
            return self._kv.cached()
        missing = self._loads.filling().union(*(step.filling for step in self._in_flight))
        return [save for save in self._kv.cached() if save.block_id not in missing]

    def begin_step(self, now: float) -> SchedulerOutput | None:
        """The next step to compute, or None: nothing can run, or as many steps are in flight as may be."""
        if len(self._in_flight) >= self._depth:
            return None
        schedule = self._scheduler.schedule(self._next_step_id, now)
        self._note_loads(schedule, now)
        for request in schedule.preempted:
            self._counters.preemptions += 1
            self._events.append(RequestPreempted(request.request_id, now))
        if not schedule.chunks and not self._forgettable:
            return None
        filling = frozenset[int]() if self._loads is None else frozenset(self._loads.filling())
        step = SchedulerOutput(
            step_id=self._next_step_id,
            new_requests=schedule.new_requests,
            chunks=tuple(schedule.chunks),
            finished_request_ids=tuple(self._forgettable),
            saves=self._take_saves(),
            fills=() if self._loads is None else self._loads.take_fills(),
        )
        self._forgettable.clear()
        self._next_step_id += 1
        self._in_flight.begin(schedule, now, filling)
        self._kv.begin_step(step.step_id)
        return step

    def _take_saves(self) -> tuple[BlockSave, ...]:
        """Of what was evicted, that which is there and not kept yet."""
        evicted = self._kv.take_saves()
        if not evicted or self._loads is None or self._connector is None:
            return ()
        filling = self._loads.filling()  # their content is not there yet, but where they came from
        return tuple(save for save in evicted if save.block_id not in filling and not self._connector.stores(save.name))

    def _note_loads(self, schedule: Schedule, now: float) -> None:
        for load in schedule.loaded:
            self._counters.loads += 1
            self._counters.loads_cut_short += load.num_arrived < load.num_blocks
            self._counters.prompt_tokens_loaded += load.num_arrived * self._block_size
            self._events.append(LoadEnded(load.request.request_id, now, load.num_arrived, load.num_blocks))
        for request in schedule.began_loading:
            self._events.append(LoadBegan(request.request_id, now))

    def finish_step(self, output: ModelOutput, now: float) -> list[RequestOutput]:
        """Take in the result of the oldest step in flight. Returns the news of its requests, and of earlier aborts."""
        granted, event = self._in_flight.retire(output.sample_seconds, now)
        assert output.step_id == granted.step_id, "steps retire in order"
        assert len(output.chunks) == len(granted.chunks), "a step's result has one entry a chunk"
        outputs = self.take_outputs()
        self._events.append(event)
        self._scheduler.retire(granted.step_id)
        num_decodes = granted.num_decodes
        self._retire_decodes(granted, output.chunks, now, outputs)
        rest = (granted.requests[num_decodes:], granted.chunks[num_decodes:], output.chunks[num_decodes:])
        for request, chunk, result in zip(*rest, strict=True):
            news = self._retire(request, chunk, result, now)
            if news is not None:
                outputs.append(news)
        self._kv.retire_step(granted.step_id)
        return outputs

    def take_outputs(self) -> list[RequestOutput]:
        """News that no step brought (aborts), once."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_events(self) -> list[Event]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def stats(self) -> CoreStats:
        return CoreStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_loading=self._scheduler.num_loading,
            num_free_blocks=self._kv.num_free_blocks,
            num_cached_blocks=self._kv.num_cached_blocks,
            num_blocks=self._num_blocks,
            evicted_blocks=self._kv.num_evicted_blocks,
            prefill_steps=self._in_flight.prefill_steps,
            step_ratios=self._in_flight.accuracy.counts,
            step_ratios_sum=self._in_flight.accuracy.total,
            tiers=() if self._connector is None else self._connector.tier_states(),
            tier_dropped_blocks=0 if self._connector is None else self._connector.num_dropped_blocks,
            **{item.name: getattr(self._counters, item.name) for item in fields(CoreCounters)},
        )

    def _check_length(self, spec: EngineRequest) -> None:
        if not spec.prompt_token_ids:
            raise EmptyPrompt
        room = self._max_model_len - min(spec.params.max_tokens, 1)
        if len(spec.prompt_token_ids) > room:
            raise RequestTooLong(len(spec.prompt_token_ids), self._max_model_len, self._num_blocks * self._block_size)

    def _make_request(self, spec: EngineRequest) -> Request:
        return Request(spec, min(len(spec.prompt_token_ids) + spec.params.max_tokens, self._max_model_len))

    def _retire_decodes(
        self, granted: Schedule, results: tuple[ChunkOutput, ...], now: float, outputs: list[RequestOutput]
    ) -> None:
        """Nearly all of them go on, in every step: those are told of without a call further."""
        num_goes_on = 0
        size, running, make, kind, add = self._block_size, _RUNNING, _make_output, RequestOutput, outputs.append
        for request, chunk, result in zip(
            granted.requests[: granted.num_decodes], granted.chunks, results, strict=False
        ):
            request_id, token_ids, logprobs, _, error = result
            known = request.token_ids
            num_tokens = len(known) + 1
            if (
                (chunk[1] + 1) % size  # no block is full with it
                and num_tokens < request.max_num_tokens
                and len(token_ids) == 1
                and request.status is running
                and error is None
                and token_ids[0] not in request.stop_token_ids
            ):
                assert request_id == chunk[0]
                known.append(token_ids[0])
                num_goes_on += 1
                add(make(kind, (
                    request_id, token_ids, logprobs, (), None, None, None, request.num_cached_tokens,
                    num_tokens - request.num_prompt_tokens, request.num_preemptions, now, (), 0.0,
                )))  # fmt: skip
            else:
                news = self._retire(request, chunk, result, now)
                if news is not None:
                    add(news)
        self._counters.generated_tokens += num_goes_on

    def _retire(self, request: Request, chunk: ScheduledChunk, result: ChunkOutput, now: float) -> RequestOutput | None:
        """Everything but the usual case: a block is full, a first or last token, an error, a part of a prefill."""
        answered, token_ids, logprobs, prompt_logprobs, error = result
        assert answered == chunk.request_id
        status = request.status
        if status is _FINISHED:
            return None  # it ended while this step was in flight: whatever came of it is dropped
        if error is not None:
            return self._finish(request, FinishReason.ERROR, now, error=error)
        end = chunk.start + chunk.num_scheduled_tokens
        # A request that was preempted since holds no block; it is not admitted again before its steps retired.
        if end >= (request.num_indexed_blocks + 1) * self._block_size and status is _RUNNING:
            self._kv.index(request, end)
        if prompt_logprobs:
            prompt_logprobs = self._new_prompt_logprobs(request, chunk.start, prompt_logprobs)
        if chunk.samples:
            return self._take_tokens(request, token_ids, logprobs, prompt_logprobs, now)
        if not request.samples and request.num_remaining_tokens == 0:
            return self._finish(request, FinishReason.LENGTH, now, prompt_logprobs=prompt_logprobs)
        return _news(request, now, prompt_logprobs=prompt_logprobs) if prompt_logprobs else None

    def _take_tokens(
        self,
        request: Request,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        prompt_logprobs: tuple[TokenLogprob, ...],
        now: float,
    ) -> RequestOutput:
        """Append what was sampled, up to the token that ends the request."""
        assert token_ids, "a chunk that samples yields a token"
        predicted_ttft = 0.0
        if not request.has_token:
            request.has_token = True
            predicted_ttft = self._promises.came_due(request, now)
            self._counters.prompt_tokens_cached += request.num_cached_tokens
        known, count = request.token_ids, len(token_ids)
        if len(known) + count < request.max_num_tokens and request.stop_token_ids.isdisjoint(token_ids):
            known += token_ids
            self._counters.generated_tokens += count
            return _news(request, now, token_ids, logprobs, prompt_logprobs, predicted_ttft=predicted_ttft)
        room = request.max_num_tokens - len(known)
        last = next((index for index, token in enumerate(token_ids[:room]) if token in request.stop_token_ids), None)
        taken = room if last is None else last + 1
        known += token_ids[:taken]
        self._counters.generated_tokens += taken
        kept = taken if last is None else last  # a stop token ends the text and is no part of it
        return self._finish(
            request,
            FinishReason.LENGTH if last is None else FinishReason.STOP,
            now,
            token_ids=token_ids[:kept],
            logprobs=logprobs[:kept],
            prompt_logprobs=prompt_logprobs,
            stop_token_id=None if last is None else token_ids[last],
            predicted_ttft=predicted_ttft,
        )

    def _new_prompt_logprobs(
        self, request: Request, start: int, logprobs: tuple[TokenLogprob, ...]
    ) -> tuple[TokenLogprob, ...]:
        """Those not reported yet (a preempted request computes its prompt again); entry i is of token start+1+i."""
        fresh = logprobs[max(0, request.num_prompt_logprobs - start) :]
        request.num_prompt_logprobs += len(fresh)
        return fresh

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
        stop_token_id: int | None = None,
        error: str | None = None,
        predicted_ttft: float = 0.0,
    ) -> RequestOutput:
        self._scheduler.remove(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]
        if request.known_to_worker:
            self._forgettable.append(request.request_id)
        self._counters.finished += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._promises.answered(len(request.token_ids) - request.num_prompt_tokens)
        self._events.append(RequestFinished(request.request_id, now))
        return _news(request, now, token_ids, logprobs, prompt_logprobs, reason, stop_token_id, error, predicted_ttft)

    def check_invariants(self) -> None:
        """Everything that must hold between calls; for tests."""
        self._scheduler.check_invariants()
        self._kv.check_invariants(self._requests.values())
        alive: Iterable[Request] = self._requests.values()
        for request in alive:
            uses = sum(owner is request for step in self._in_flight for owner in step.granted.requests)
            pending = sum(
                chunk.samples
                for step in self._in_flight
                for owner, chunk in zip(step.granted.requests, step.granted.chunks, strict=True)
                if owner is request
            )
            assert request.num_computed_tokens <= request.num_tokens + pending, "computed what nobody will have sampled"
            assert (uses > 0) == any(step.step_id <= request.last_step for step in self._in_flight)
        if not self._requests and not self._in_flight:
            assert self._kv.num_free_blocks == self._num_blocks, "blocks leaked"


def _news(
    request: Request,
    now: float,
    token_ids: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprob, ...] = (),
    prompt_logprobs: tuple[TokenLogprob, ...] = (),
    finish_reason: FinishReason | None = None,
    stop_token_id: int | None = None,
    error: str | None = None,
    predicted_ttft: float = 0.0,
) -> RequestOutput:
    num_output_tokens = len(request.token_ids) - request.num_prompt_tokens
    cached, preemptions = request.num_cached_tokens, request.num_preemptions
    fields_in_order = (
        request.request_id, token_ids, logprobs, prompt_logprobs, finish_reason, stop_token_id, error,
        cached, num_output_tokens, preemptions, now, (), predicted_ttft,
    )  # fmt: skip
    return _make_output(RequestOutput, fields_in_order)
