"""`POST /v1/ttft/estimate`: when the first token of a request would come, without running it."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from headstart.server.chat import ChatApi
from headstart.server.completions import CompletionsApi
from headstart.server.errors import ApiError
from headstart.server.generation import GenerationEndpoint, as_api_error
from headstart.server.http import ClientGoneError, read_json_body, received_at, send_error, send_json
from headstart.server.promise import asker_of
from headstart.server.protocol import decode
from headstart.server.services import Services


class _Kind(msgspec.Struct):
    messages: Any = None


class EstimateEndpoint:
    """ASGI application. The body is a chat request, which has messages, or one for plain completions."""

    def __init__(self, services: Services, chat: ChatApi, completions: CompletionsApi) -> None:
        self._services = services
        self._chat = GenerationEndpoint(services, chat)
        self._completions = GenerationEndpoint(services, completions)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            received = received_at(scope)
            body = await read_json_body(scope, receive, self._services.max_body_bytes)
            endpoint = self._completions if decode(body, _Kind).messages is None else self._chat
            await send_json(send, await endpoint.estimate(body, received, asker_of(scope)))
        except ClientGoneError:
            return
        except ApiError as error:
            await send_error(send, error, receive=receive if error.status == 413 else None)
        except Exception as error:
            await send_error(send, as_api_error(error))
