"""One server under test: finds its model, learns how it counts tokens, and makes requests in its terms.

Owns OpenAI's request bodies; must not know workloads or statistics.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from headstart.bench.chunks import Cumulative, read_chunks
from headstart.bench.http import HttpClient, Origin, TransferError, encode_request
from headstart.bench.options import ApiName, BenchError, BenchOptions
from headstart.bench.prompts import LEAD_WORDS, PromptMaker, PromptShape, single_token_words, text_of
from headstart.bench.session import RequestPlan
from headstart.bench.sse import error_message


class _Whole:
    """A sink for answers that are not streamed."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()

    def on_sent(self, now: float) -> None: ...

    def on_head(self, status: int, headers: dict[str, str], now: float) -> None:
        self.status, self.headers = status, headers

    def on_body(self, data: bytes, now: float) -> None:
        self.body += data


@dataclass(frozen=True, slots=True)
class _RefusedError(Exception):
    """The server said no. `status` is HTTP's."""

    status: int
    message: str


class Target:
    """A server and how to talk to it. `name` is its column in the report. Call `prepare` first."""

    def __init__(self, name: str, url: str, options: BenchOptions, *, model: str | None) -> None:
        self.name = name
        self.origin = Origin.parse(url)
        self.client = HttpClient(self.origin, connect_timeout=options.connect_timeout)
        self.model = model or ""
        self.server = ""
        self._api: ApiName = options.api
        self._ignore_eos = options.ignore_eos
        self._timeout = options.timeout
        self._headers = [("Authorization", f"Bearer {options.api_key}")] if options.api_key else []
        self._maker: PromptMaker | None = None

    @property
    def maker(self) -> PromptMaker:
        assert self._maker is not None, "prepare() was not awaited"
        return self._maker

    async def prepare(self) -> None:
        """Find the model and calibrate the prompts; it also warms the server up. Raises `BenchError` if that fails."""
        try:
            if not self.model:
                self.model = await self._first_model()
            shape = await self._calibrate()
        except TransferError as error:
            raise BenchError(f"{self.origin.host_header}: {error}") from None
        except _RefusedError as refused:
            raise BenchError(f"{self.origin.host_header} refused: HTTP {refused.status}: {refused.message}") from None
        self._maker = PromptMaker(shape, random.Random())

    # -- requests

    def plan(
        self,
        group: str,
        words: Sequence[str],
        *,
        max_tokens: int,
        system_words: int = LEAD_WORDS,
        wanted: int | None = None,
    ) -> RequestPlan:
        """A request whose prompt is these words. `wanted`: the prompt's length as the workload asked for it."""
        prompt_tokens = len(words) + self.maker.shape.overhead if wanted is None else wanted
        if self._api == "completions":
            body: dict[str, Any] = {"prompt": text_of(words)}
        else:
            body = {"messages": self.maker.messages(words, system_words=system_words)}
        if self._ignore_eos:
            body["ignore_eos"] = True
        return RequestPlan(group, self._stream_request(body, max_tokens), prompt_tokens)

    def plan_chat(self, group: str, messages: list[dict[str, str]], *, max_tokens: int) -> RequestPlan:
        """A chat turn as a user would send it: it may end when the model ends it."""
        return RequestPlan(group, self._stream_request({"messages": messages}, max_tokens), keep_text=True)

    def _stream_request(self, body: dict[str, Any], max_tokens: int) -> bytes:
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        full = body | {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = [*self._headers, ("Accept", "text/event-stream")]
        return encode_request(self.origin, "POST", path, msgspec.json.encode(full), headers)

    # -- questions to the server

    async def chunks(self) -> Cumulative:
        """How many steps of which size it has computed so far; empty if it does not say."""
        whole = _Whole()
        try:
            async with asyncio.timeout(self._timeout):
                await self.client.exchange(encode_request(self.origin, "GET", "/metrics", b"", self._headers), whole)
        except (TimeoutError, TransferError):
            return {}
        return read_chunks(whole.body.decode(errors="replace")) if whole.status == 200 else {}

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One plain request. Raises `_RefusedError` for any status but 200, `TransferError` if it broke."""
        whole = _Whole()
        encoded = msgspec.json.encode(body) if body is not None else b""
        try:
            async with asyncio.timeout(self._timeout):
                await self.client.exchange(encode_request(self.origin, method, path, encoded, self._headers), whole)
        except TimeoutError:
            raise TransferError(f"{path} did not answer within {self._timeout:g} s") from None
        self.server = whole.headers.get("server", self.server)
        if whole.status != 200:
            raise _RefusedError(whole.status, error_message(bytes(whole.body)))
        try:
            return msgspec.json.decode(whole.body)
        except msgspec.DecodeError as error:
            raise TransferError(f"{path} answered with something that is not JSON: {error}") from None

    async def _first_model(self) -> str:
        listing = await self._call("GET", "/v1/models")
        try:
            return str(listing["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise BenchError(f"{self.origin.host_header} lists no model at /v1/models; name one with --model") from None

    async def _prompt_tokens(self, body: dict[str, Any]) -> int:
        """What the server counts for a prompt, from the usage of a one-token answer."""
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        answer = await self._call("POST", path, body | {"model": self.model, "max_tokens": 1, "temperature": 0})
        try:
            return int(answer["usage"]["prompt_tokens"])
        except (KeyError, TypeError, ValueError):
            raise BenchError(
                f"{self.origin.host_header} reports no usage.prompt_tokens; prompts cannot be measured"
            ) from None

    async def _count_by_usage(self, text: str) -> int:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
        return await self._prompt_tokens({"prompt": text} if self._api == "completions" else body)

    async def _count_by_tokenize(self, text: str) -> int:
        """`/tokenize` as headstart and vLLM (prompt -> count) or llama.cpp (content -> tokens) have it."""
        answer = await self._call("POST", "/tokenize", {"model": self.model, "prompt": text, "content": text})
        return int(answer["count"]) if "count" in answer else len(answer["tokens"])

    async def _calibrate(self) -> PromptShape:
        try:
            await self._count_by_tokenize("probe")
            words = await single_token_words(self._count_by_tokenize)
        except (_RefusedError, TransferError, KeyError, TypeError, ValueError):
            words = await single_token_words(self._count_by_usage)
        try:
            return await self._measure(PromptShape(words, 0, has_system=True, exact=True))
        except _RefusedError as refused:
            if self._api == "completions" or refused.status not in (400, 422, 500):
                raise
            return await self._measure(PromptShape(words, 0, has_system=False, exact=True))

    async def _measure(self, shape: PromptShape) -> PromptShape:
        """Measure the overhead on a short prompt; check it on a longer one."""
        rng = random.Random()

        async def counted(num_words: int) -> int:
            maker = PromptMaker(shape, rng)
            words = maker.unique(num_words)
            return await self._prompt_tokens(
                {"prompt": text_of(words)} if self._api == "completions" else {"messages": maker.messages(words)}
            )

        overhead = await counted(LEAD_WORDS + 8) - (LEAD_WORDS + 8)
        return replace(shape, overhead=overhead, exact=await counted(LEAD_WORDS + 56) - (LEAD_WORDS + 56) == overhead)
