"""The life of a generating request in the API process, the same for chat and plain completions.

Body, parse and render, tokenize, submit; then the headers are held until there is text, so that they carry the ledger
and so that what fails before the first token is an HTTP status; then chunks, or one whole answer. A client that leaves
ends all of it at once, in whatever state.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

import headstart
from headstart.core.errors import SloMiss
from headstart.core.request import EngineRequest
from headstart.engine import EngineDeadError, QueueFullError, RequestRefused, Reservation
from headstart.metrics.collector import REFUSED, SLO_REJECTED, RequestTrack
from headstart.metrics.ledger import Ledger
from headstart.prompt.explain import Explanation
from headstart.prompt.sent import Sent
from headstart.server import sse
from headstart.server.choice import AnswerMemory, Choice, Delta, Keeper, TokenKeeper, run_choice
from headstart.server.errors import ApiError, Headers, bad_field, engine_dead, internal_error, queue_full, shutting_down
from headstart.server.formats import Api, Head, Whole, usage
from headstart.server.http import (
    HOLD_NEXT_WRITE,
    ClientGoneError,
    WatchClient,
    read_json_body,
    received_at,
    send_error,
)
from headstart.server.merge import merge
from headstart.server.params import Generation, nth_seed
from headstart.server.promise import Asker, asker_of, estimate_fields, predicted_header, slo_missed
from headstart.server.services import Services
from headstart.server.timing import Stamps, server_timing
from headstart.text import Detokenizer, Prompt

logger = logging.getLogger("headstart.server")
_FAREWELL_SECONDS = 1.0
_LARGE_BODY = 16 * 1024  # bytes
_MADE_AT_ONCE = 32  # choices of a batch between two turns of the event loop


@dataclass(frozen=True, slots=True)
class Job:
    """A submitted request: what was asked, when, and the choices that answer it."""

    asked: Generation
    head: Head
    stamps: Stamps
    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    explanations: tuple[Explanation, ...] = ()  # of each prompt, if they are asked for

    @property
    def num_cached_tokens(self) -> list[int]:
        """Of each prompt's first choice: the others find what it has just computed."""
        return [choice.num_cached_tokens for choice in self.choices[:: self.asked.n]]

    @property
    def predicted_ttft(self) -> float:
        """In seconds, as the engine said when it let the first choice in; 0 before there is a token."""
        source = self.choices[0].source
        return 0.0 if source is None else source.predicted_ttft

    def usage(self, ledger: Ledger | None) -> dict[str, Any]:
        generated = sum(choice.num_output_tokens for choice in self.choices)
        return usage(self.num_prompt_tokens, generated, sum(self.num_cached_tokens), ledger, self.predicted_ttft)


class GenerationEndpoint:
    """ASGI application of one generating route."""

    def __init__(self, services: Services, api: Api) -> None:
        self._services = services
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = _Reply(send, scope.get(HOLD_NEXT_WRITE))
        try:
            received = received_at(scope)
            body = await read_json_body(scope, receive, self._services.max_body_bytes)
            await self._answer_unless_gone(body, received, asker_of(scope), reply, receive)
        except ClientGoneError:
            return
        except asyncio.CancelledError:  # the server's grace is over; this task ends here, so nobody else needs to know
            await reply.fail(shutting_down(), receive)
        except Exception as error:
            if isinstance(error, SloMiss):
                self._services.collector.slo(SLO_REJECTED)
            await reply.fail(as_api_error(error), receive)

    async def estimate(self, body: bytearray, received: float, asker: Asker) -> dict[str, object]:
        """What the engine predicts for the request now; it is not run. Raises what running it would."""
        job = await self._submit(body, received, asker)
        request = job.choices[0].request
        found = await self._services.engine.estimate(request)
        before = job.stamps.submitted - job.stamps.received
        fields = estimate_fields(found, before, len(request.prompt_token_ids), request.slo_ttft)
        return fields | self._explained(replace(job, explanations=job.explanations[:1]), [found.num_cached_tokens])

    async def _answer_unless_gone(
        self, body: bytearray, received: float, asker: Asker, reply: _Reply, receive: Receive
    ) -> None:
        try:
            async with WatchClient(receive):
                await self._answer(body, received, asker, reply)
        except ClientGoneError:
            self._services.collector.client_gone()

    async def _answer(self, body: bytearray, received: float, asker: Asker, reply: _Reply) -> None:
        job = await self._submit(body, received, asker)
        if job.asked.stream:
            await self._stream(job, reply)
        else:
            await self._whole(job, reply)

    async def _submit(self, body: bytearray, received: float, asker: Asker) -> Job:
        """Everything before the engine. Raises `ApiError`."""
        services, api = self._services, self._api
        limits = services.limits()
        if len(body) > _LARGE_BODY:  # others' tokens are not held up by its template
            model, asked = await services.pool.run(api.parse, body, limits)
        else:
            model, asked = api.parse(body, limits)
        services.check_model(model)
        services.explainer.check(asker)
        if asker.explain:  # the end of a stream is where it is told
            asked = replace(asked, include_usage=True)
        self._check_choices(asked)
        parsed = time.monotonic()
        prompts = await self._tokenize(asked, limits.max_model_len)
        for prompt in prompts:
            services.check_length(prompt.ids, asked.sampling.max_tokens, api.prompt_field)
        sent = services.explainer.sent(asked, prompts)
        explanations = await services.explainer.explain(asked, sent, asker)
        submitted = time.monotonic()
        stamps = Stamps(received, parsed, submitted)
        answer_id = api.id_prefix + uuid.uuid4().hex
        head = Head(answer_id, int(time.time()), services.model_name, f"headstart-{headstart.__version__}")
        choices: list[Choice] = []
        for prompt, mine in zip(prompts, sent, strict=True):
            for nth in range(asked.n):
                memory = self._memory(prompt, mine, asker, len(body), leads=not nth)
                choices.append(self._choice(len(choices), prompt, asked, head.id, stamps, asker, memory))
                if len(choices) % _MADE_AT_ONCE == 0:
                    await asyncio.sleep(0)
        num_tokens = sum(len(prompt.ids) for prompt in prompts)
        return Job(asked, head, stamps, tuple(choices), num_tokens, explanations)

    async def _tokenize(self, asked: Generation, max_model_len: int) -> list[Prompt]:
        texts = [prompt for prompt in asked.prompts if isinstance(prompt, str)]
        if texts:
            assert len(texts) == len(asked.prompts), "prompts of a request are of one kind"
            field = self._api.prompt_field
            prompts = await self._services.tokenize(
                texts, asked.add_special_tokens, max_model_len, field, asked.cache_salt
            )
            self._note_sources(prompts)
            return prompts
        return [Prompt(prompt) for prompt in asked.prompts if not isinstance(prompt, str)]

    def _note_sources(self, prompts: Sequence[Prompt]) -> None:
        total = sum(len(prompt.ids) for prompt in prompts)
        remembered = sum(prompt.num_remembered for prompt in prompts)
        sampled = sum(prompt.num_sampled for prompt in prompts)
        self._services.collector.tokenized(tokenizer=total - remembered, memory=remembered - sampled, sampled=sampled)

    def _check_choices(self, asked: Generation) -> None:
        count = len(asked.prompts) * asked.n
        if count > self._services.max_choices:
            raise bad_field(
                "n" if asked.n > 1 else self._api.prompt_field,
                f"asks for {count} answers; at most {self._services.max_choices} can be made or wait at once",
            )

    def _choice(
        self,
        index: int,
        prompt: Prompt,
        asked: Generation,
        answer_id: str,
        stamps: Stamps,
        asker: Asker,
        memory: AnswerMemory | None,
    ) -> Choice:
        ids = prompt.ids
        room = self._services.engine.info.max_model_len - len(ids)
        params = replace(
            asked.sampling,
            max_tokens=min(asked.sampling.max_tokens, room),
            seed=nth_seed(asked.sampling.seed, index % asked.n),
        )
        request = EngineRequest(
            request_id=f"{answer_id}-{index}",
            prompt_token_ids=ids,
            params=params,
            arrival_time=stamps.received,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            submit_time=0.0 if index % asked.n else stamps.submitted,  # the others wait for the first
            tenant=asker.tenant,
            slo_ttft=None if index else self._slo(asked, asker),
        )
        return Choice(index, request, self._echo(asked, index, ids), asked, self._services.tokenizer, memory)

    def _memory(self, prompt: Prompt, sent: Sent, asker: Asker, body_bytes: int, *, leads: bool) -> AnswerMemory | None:
        """For those who will want to know one answer to the prompt; `leads`: the first one."""
        keepers: list[Keeper] = [] if prompt.end is None else [TokenKeeper(self._services.recent, prompt.end)]
        if keeper := self._services.explainer.keeper(sent, asker.tenant, body_bytes, leads=leads):
            keepers.append(keeper)
        return AnswerMemory(keepers) if keepers else None

    def _slo(self, asked: Generation, asker: Asker) -> float | None:
        """Of an answer's first choice: the field's, else the header's, else the server's."""
        wanted = asker.slo_ttft if asked.slo_ttft is None else asked.slo_ttft
        default = self._services.config.scheduler.slo_ttft_ms
        return wanted if wanted is not None or default is None else default / 1000

    def _echo(self, asked: Generation, index: int, ids: tuple[int, ...]) -> str:
        """The prompt as text. Of ids that end inside a character, that character comes with the answer."""
        if not asked.echo:
            return ""
        prompt = asked.prompts[index // asked.n]
        if isinstance(prompt, str):
            return prompt
        return Detokenizer(self._services.tokenizer, (), (), asked.skip_special_tokens).push(ids)

    def _deltas(self, job: Job) -> AsyncGenerator[Delta, None]:
        if len(job.choices) > 1:
            return self._deltas_of_several(job)
        (choice,) = job.choices
        return run_choice(self._services.engine, choice, self._track(job, choice))

    async def _deltas_of_several(self, job: Job) -> AsyncGenerator[Delta, None]:
        """All choices at once or none; of those with one prompt, the first goes ahead and leaves it in the prefix
        cache."""
        engine = self._services.engine
        tracks = [self._track(job, choice) for choice in job.choices]
        try:
            reservation = engine.reserve(len(job.choices))
        except RequestRefused:
            for track in tracks:
                track.close(REFUSED)
            raise
        with reservation:
            async with aclosing(merge(self._sources(job, tracks, reservation))) as deltas:
                async for delta in deltas:
                    yield delta

    def _track(self, job: Job, choice: Choice) -> RequestTrack:
        return self._services.collector.track(job.stamps.received, len(choice.request.prompt_token_ids))

    def _sources(
        self, job: Job, tracks: Sequence[RequestTrack], reservation: Reservation
    ) -> list[AsyncGenerator[Delta, None]]:
        engine, info = self._services.engine, self._services.engine.info
        sources = []
        leader_begun = asyncio.Event()
        for choice, track in zip(job.choices, tracks, strict=True):
            begun, after = asyncio.Event(), None
            if choice.index % job.asked.n == 0:
                leader_begun = begun
            elif info.prefix_cache and len(choice.request.prompt_token_ids) > info.block_size:
                after = leader_begun
            sources.append(run_choice(engine, choice, track, reservation=reservation, after=after, begun=begun))
        return sources

    async def _stream(self, job: Job, reply: _Reply) -> None:
        encoder = self._api.encoder(job.head, job.asked)
        ledger: Ledger | None = None
        started = False
        left = len(job.choices)
        last = b""
        async with aclosing(self._deltas(job)) as deltas:
            async for delta in deltas:
                event = encoder.chunk(delta)
                left -= delta.finish_reason is not None
                if not started:
                    ledger, started = self._first_text(job, delta), True
                    await reply.start((*sse.HEADERS, *self._promised(job, ledger)), ledger)
                if left:
                    await reply.write(event)
                else:
                    last = event
        told = job.usage(ledger) | self._explained(job, job.num_cached_tokens)
        if job.asked.include_usage:
            last += encoder.usage(told)
        await reply.write(last + sse.DONE, more=False)

    async def _whole(self, job: Job, reply: _Reply) -> None:
        ledger: Ledger | None = None
        started = False
        wholes = [Whole(choice.index) for choice in job.choices]
        async with aclosing(self._deltas(job)) as deltas:
            async for delta in deltas:
                if not started:
                    ledger, started = self._first_text(job, delta), True
                wholes[delta.index].add(delta)
        answer = {
            **job.head.fields(self._api.object()),
            "choices": [self._api.choice(whole, job.asked) for whole in wholes],
            "usage": job.usage(ledger) | self._explained(job, job.num_cached_tokens),
        }
        body = msgspec.json.encode(answer)
        headers = ((b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()))
        await reply.start((*headers, *self._promised(job, ledger)), ledger)
        await reply.write(body, more=False)

    def _first_text(self, job: Job, delta: Delta) -> Ledger | None:
        """The ledger as of now; None for a request without any token (a prompt that was only scored)."""
        if not delta.source.ledger:
            return None
        waited = job.choices[delta.index].request.submit_time - job.stamps.submitted
        ledger = job.stamps.ledger(delta.source, time.monotonic(), waited)
        self._services.collector.first_token(ledger, job.predicted_ttft, job.choices[0].request.slo_ttft)
        return ledger

    def _explained(self, job: Job, num_cached: Sequence[int]) -> dict[str, object]:
        """Why each prompt missed the prefix cache, by the name that answers have for it; empty if nobody asked."""
        if not job.explanations:
            return {}
        return {"explain": self._services.explainer.told(job.explanations, num_cached, job.head.id)}

    @staticmethod
    def _promised(job: Job, ledger: Ledger | None) -> Headers:
        return () if ledger is None or not job.predicted_ttft else predicted_header(job.predicted_ttft)


class _Reply:
    """The response as far as it has got: what can still fail with a status, and what only with an error event."""

    def __init__(self, send: Send, hold_next_write: Callable[[], None] | None) -> None:
        self._send = send
        self._hold_next_write = hold_next_write
        self._started = False
        self._ended = False

    async def start(self, headers: tuple[tuple[bytes, bytes], ...], ledger: Ledger | None) -> None:
        """What this sends leaves with the first `write`."""
        timing = () if ledger is None else ((b"server-timing", server_timing(ledger)),)
        self._started = True
        if self._hold_next_write is not None:
            self._hold_next_write()
        await self._send({"type": "http.response.start", "status": 200, "headers": (*headers, *timing)})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        self._ended = not more
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def fail(self, error: ApiError, receive: Receive) -> None:
        if self._ended:
            return
        try:
            async with asyncio.timeout(_FAREWELL_SECONDS if self._started else None):
                if self._started:
                    await self.write(sse.error_event(error), more=False)
                else:
                    await send_error(self._send, error, receive=receive if error.status == 413 else None)
        except TimeoutError:
            logger.debug("a client that does not read missed its error")


def as_api_error(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case SloMiss():
            return slo_missed(error)
        case QueueFullError():
            return queue_full(error.num_waiting, error.limit)
        case EngineDeadError():
            return engine_dead()
        case RequestRefused():
            return ApiError(400, str(error), code="request_refused")
    logger.error("request failed", exc_info=error)
    return internal_error()
