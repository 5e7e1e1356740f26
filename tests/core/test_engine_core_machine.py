"""Arrivals, aborts, steps and failures in any order, against what each request yields when computed alone."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headstart.config import SchedulerConfig
from headstart.core.connector import KVArrival
from headstart.core.cost import LinearCosts
from headstart.core.engine_core import EngineCore
from headstart.core.errors import QueueFull, RequestTooLong, SloMiss
from headstart.core.request import EngineRequest, FinishReason
from headstart.core.step import ModelOutput, RequestOutput
from tests.core.fake_tier import FakeTier
from tests.core.harness import FakeWorker, expected_tokens, make_spec

VOCAB = 2


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.integers(1, 4),
        depth=st.integers(1, 3),
        policy=st.sampled_from(["fcfs", "srpf", "edf"]),
        budget=st.integers(5, 24),
        mixed=st.integers(1, 5),
        max_num_seqs=st.integers(1, 4),
        horizon=st.sampled_from([float("inf"), 4.0]),
        prefix_cache=st.booleans(),
        max_num_waiting=st.integers(1, 6),
        rejects=st.booleans(),
        min_shared=st.sampled_from([1, 4, 64]),
        tier_seconds=st.sampled_from([None, 0.0, 0.5]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        depth: int,
        policy: str,
        budget: int,
        mixed: int,
        max_num_seqs: int,
        horizon: float,
        prefix_cache: bool,
        max_num_waiting: int,
        rejects: bool,
        min_shared: int,
        tier_seconds: float | None,
    ) -> None:
        config = SchedulerConfig(
            policy=policy,  # type: ignore[arg-type]
            max_num_batched_tokens=budget,
            max_chunk_ms=1000.0 * budget,
            slo_tpot_ms=1000.0 * mixed,
            slo_ttft_ms=4000,
            on_slo_miss="reject" if rejects else "queue",
            attention_horizon=horizon,
            max_num_seqs=max_num_seqs,
            max_num_waiting=max_num_waiting,
            aging_ms=5000,
            srpf_weight=0.5,
            pipeline_depth=depth,
        )
        self.max_model_len = num_blocks * block_size
        self.budget = budget
        self.rejects = rejects
        self.depth = depth
        self.tier = None if tier_seconds is None else FakeTier(block_size, tier_seconds)
        self.core = EngineCore(
            config,
            LinearCosts(step=0.25, prefill_token=0.75, prefill_context=0.125, decode=0.25),
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=self.max_model_len,
            prefix_cache=prefix_cache,
            connector=self.tier,
        )
        self.core._scheduler._pending._min_tokens = min_shared  # so that short prompts wait for each other too
        self.worker = FakeWorker(block_size, VOCAB, tier=self.tier)
        self.results: deque[ModelOutput] = deque()
        self.now = 0.0
        self.specs: dict[str, EngineRequest] = {}
        self.received: dict[str, list[int]] = {}
        self.finished: dict[str, RequestOutput] = {}
        self.aborted: set[str] = set()

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
        max_tokens=st.integers(0, 12),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "a"]),
        stops=st.booleans(),
        tenant=st.sampled_from(["", "b"]),
        slo=st.sampled_from([None, 0.5, 30.0]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        salt: str,
        stops: bool,
        tenant: str,
        slo: float | None,
    ) -> None:
        self._add(prompt, max_tokens, priority, salt, stops, tenant, slo)

    @precondition(lambda self: self.specs)
    @rule(data=st.data(), more=st.lists(st.integers(0, VOCAB - 1), max_size=4))
    def add_next_turn(self, data: st.DataObject, more: list[int]) -> None:
        """A prompt that continues an earlier request's text: the usual prefix hit."""
        name = data.draw(st.sampled_from(sorted(self.specs)))
        earlier = self.specs[name]
        prompt = [*earlier.prompt_token_ids, *self.received[name], *more]
        self._add(prompt, 3, 0, earlier.cache_salt, False)

    @precondition(lambda self: self.specs)
    @rule(data=st.data(), more=st.lists(st.integers(0, VOCAB - 1), max_size=6), priority=st.integers(-1, 1))
    def add_the_same(self, data: st.DataObject, more: list[int], priority: int) -> None:
        """The beginning of an earlier prompt, which may be under way: the second waits for the first."""
        earlier = self.specs[data.draw(st.sampled_from(sorted(self.specs)))]
        self._add([*earlier.prompt_token_ids, *more], 3, priority, earlier.cache_salt, False)

    def _add(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        salt: str,
        stops: bool,
        tenant: str = "",
        slo: float | None = None,
    ) -> None:
        name = f"r{len(self.specs)}"
        spec = make_spec(
            name,
            prompt,
            max_tokens=max_tokens,
            arrival=self.now,
            priority=priority,
            salt=salt,
            stop=(1,) if stops else (),
            tenant=tenant,
            slo_ttft=slo,
        )
        stats = self.core.stats()
        too_long = len(prompt) > self.max_model_len - min(max_tokens, 1)
        full = stats.num_waiting >= self.core._config.max_num_waiting
        if not too_long:
            assert 0 <= self.core.estimate(spec, self.now).seconds < 1e9
            assert self.core.stats() == stats, "an estimate changes nothing"
        try:
            self.core.add_request(spec, self.now)
        except RequestTooLong:
            assert too_long
        except QueueFull:
            assert full
        except SloMiss:
            assert slo is not None
            assert self.rejects
        else:
            assert not too_long
            assert not full
            self.specs[name] = spec
            self.received[name] = []
            self.worker.salts[name] = salt

    @rule()
    def begin(self) -> None:
        step = self.core.begin_step(self.now)
        if step is not None:
            assert step.chunks or step.finished_request_ids
            assert step.num_scheduled_tokens <= self.budget
            # The worker runs steps at once and in order: what it overwrites too early, a later read notices.
            self.results.append(self.worker.execute(step))

    @rule(count=st.integers(1, 12))
    def run_on(self, count: int) -> None:
        """Many steps at once: what was added comes to its end, and is evicted by the next."""
        for _ in range(count):
            self.begin()
            if self.results:
                self.finish(1.0)

    @precondition(lambda self: self.results)
    @rule(seconds=st.floats(0, 3))
    def finish(self, seconds: float) -> None:
        self.now += seconds
        self._take(self.core.finish_step(self.results.popleft(), self.now))

    @precondition(lambda self: self.tier is not None and self.tier.loads)
    @rule(data=st.data(), ended=st.booleans())
    def arrive(self, data: st.DataObject, ended: bool) -> None:
        """A load came so far; or it failed there."""
        assert self.tier is not None
        load_id = data.draw(st.sampled_from(sorted(self.tier.loads)))
        count = data.draw(st.integers(0, len(self.tier.loads[load_id])))
        self.core.kv_arrived(KVArrival(load_id, count, ended))

    @precondition(lambda self: self.tier is not None and self.tier.stored)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """The tier gives a block up; what it has staged of it stays so."""
        assert self.tier is not None
        del self.tier.stored[data.draw(st.sampled_from(sorted(self.tier.stored)))]

    @precondition(lambda self: self.specs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.specs)))
        alive = name not in self.finished and name not in self.aborted
        self.core.abort(name, self.now)
        if alive:
            self.aborted.add(name)

    @rule()
    def collect(self) -> None:
        self._take(self.core.take_outputs())

    @precondition(lambda self: self.specs)
    @rule(data=st.data())
    def start_failing(self, data: st.DataObject) -> None:
        self.worker.failing.add(data.draw(st.sampled_from(sorted(self.specs))))

    def _take(self, news: list[RequestOutput]) -> None:
        for output in news:
            name = output.request_id
            assert name not in self.finished, "news after the last"
            self.received[name].extend(output.token_ids)
            if output.finish_reason is not None:
                self.finished[name] = output
                self._check_finished(name, output)

    def _check_finished(self, name: str, output: RequestOutput) -> None:
        tokens, reason = expected_tokens(self.specs[name], vocab_size=VOCAB, max_model_len=self.max_model_len)
        received = self.received[name]
        if output.finish_reason is FinishReason.ABORT:
            assert name in self.aborted
            assert received == tokens[: len(received)]
        elif output.finish_reason is FinishReason.ERROR:
            assert name in self.worker.failing
            assert output.error
            assert received == tokens[: len(received)]
        else:
            assert (received, output.finish_reason) == (tokens, reason)
            assert output.num_cached_tokens < len(self.specs[name].prompt_token_ids) or not received

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "core"):
            self.core.check_invariants()
            assert self.core.num_in_flight == len(self.results) <= self.depth

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(5_000):
            if not self.core.has_work:
                break
            self.begin()
            if self.results:
                self.finish(1.0)
            else:
                check = self.core.next_check()
                assert check is not None, "work is left but no step can run"
                self.now = max(self.now, check) + 0.001
        self._take(self.core.take_outputs())
        self.holds()
        assert set(self.finished) == set(self.specs), "a request was forgotten"
        assert not self.worker.tokens, "the worker still holds finished requests"
        stats = self.core.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.finished == len(self.specs)
        assert stats.num_running == stats.num_waiting == 0


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
