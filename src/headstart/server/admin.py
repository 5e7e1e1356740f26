"""The endpoints that do not generate: models, probes, metrics, tokenizing and its reverse."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headstart.engine import EngineState
from headstart.metrics import prometheus
from headstart.server.errors import ApiError, bad_field, unknown_model
from headstart.server.http import ClientGoneError, read_json_body, send_error, send_json
from headstart.server.params import check_token_ids
from headstart.server.protocol import DetokenizeRequest, TokenizeRequest, decode
from headstart.server.services import Services


class Admin:
    """Handlers of one served model."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._services.model_name:
            raise unknown_model(name, self._services.model_name)
        return _json(self._model())

    async def health(self, request: Request) -> Response:
        """Whether restarting would help: 503 only when the engine is dead."""
        dead = self._services.engine.state is EngineState.DEAD
        return _json({"status": "dead" if dead else "ok"}, 503 if dead else 200)

    async def ready(self, request: Request) -> Response:
        """Whether requests are served: 503 until the model is loaded and warmed up."""
        state = self._services.engine.state
        return _json({"status": state.value}, 200 if state is EngineState.READY else 503)

    async def metrics(self, request: Request) -> Response:
        content = self._services.collector.exposition()
        return Response(content, headers={"content-type": prometheus.CONTENT_TYPE.decode()})

    async def tokenize(self, body: bytearray) -> dict[str, Any]:
        """The tokens of a text, or of messages as the chat template renders them."""
        services = self._services
        fields = decode(body, TokenizeRequest)
        limits = services.limits()
        services.check_model(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise bad_field("prompt", "or messages is required, and not both")
        if fields.prompt is not None:
            text, special, param = fields.prompt, fields.add_special_tokens is not False, "prompt"
        else:
            text = await services.pool.run(
                services.prompts.render,
                fields.messages,
                tools=fields.tools,
                add_generation_prompt=fields.add_generation_prompt is not False,
                extra={},
            )
            special, param = bool(fields.add_special_tokens), "messages"
        (prompt,) = await services.tokenize((text,), special, limits.max_model_len, param)
        ids = prompt.ids
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": limits.max_model_len, "tokens": ids}
        if fields.return_token_strs:
            answer["token_strs"] = await services.pool.run(lambda: list(map(services.tokenizer.token_text, ids)))
        return answer

    async def detokenize(self, body: bytearray) -> dict[str, Any]:
        services = self._services
        fields = decode(body, DetokenizeRequest)
        limits = services.limits()
        services.check_model(fields.model)
        if fields.tokens is None:
            raise bad_field("tokens", "is required")
        if len(fields.tokens) > limits.max_model_len:
            raise bad_field("tokens", f"holds {len(fields.tokens)} ids; at most {limits.max_model_len} are allowed")
        ids = check_token_ids("tokens", fields.tokens, limits.vocab_size)
        skip = bool(fields.skip_special_tokens)
        return {"prompt": await services.pool.run(services.tokenizer.decode, ids, skip)}

    def _model(self) -> dict[str, Any]:
        services = self._services
        fields = {"id": services.model_name, "object": "model", "created": services.created, "owned_by": "headstart"}
        if services.engine.state is EngineState.READY:
            fields["max_model_len"] = services.engine.info.max_model_len
        return fields


class JsonEndpoint:
    """ASGI application: a JSON body in, `handle`'s value out."""

    def __init__(
        self, handle: Callable[[bytearray], Awaitable[dict[str, Any]]], max_body_bytes: Callable[[], int]
    ) -> None:
        self._handle = handle
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_json_body(scope, receive, self._limit())
            await send_json(send, await self._handle(body))
        except ClientGoneError:
            return
        except ApiError as error:
            await send_error(send, error, receive=receive if error.status == 413 else None)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
