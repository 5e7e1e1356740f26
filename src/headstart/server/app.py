"""The ASGI application: routes, and the layers around them (observation, CORS, API keys). Starts and stops nothing."""

from __future__ import annotations

import logging
import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.config import Config
from headstart.engine import AsyncEngine
from headstart.hub.generation_config import SamplingDefaults
from headstart.metrics.collector import Collector
from headstart.server.admin import Admin, JsonEndpoint
from headstart.server.auth import ApiKeyGate
from headstart.server.chat import ChatApi
from headstart.server.completions import CompletionsApi
from headstart.server.errors import ApiError, internal_error
from headstart.server.estimate import EstimateEndpoint
from headstart.server.formats import Api
from headstart.server.generation import GenerationEndpoint
from headstart.server.http import REFUSED, received_at, request_id
from headstart.server.services import Services, make_services
from headstart.server.warmup import warm_up
from headstart.text import ChatTemplate, Tokenizer

access_logger = logging.getLogger("headstart.access")
OTHER = "other"  # the route, in the metrics, of what has none
_EXPOSED = ("server-timing", "x-request-id", "retry-after", "x-headstart-predicted-ttft-ms")


def create_app(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate,
    config: Config,
    defaults: SamplingDefaults | None = None,
) -> Observed:
    """The HTTP API of one served model. The engine may still be starting: until it is ready, requests get 503.

    `defaults`: what requests get for sampling fields that they leave out.
    """
    services = make_services(config, engine, tokenizer, chat_template, defaults or SamplingDefaults())
    chat, completions = ChatApi(services.prompts), CompletionsApi()
    apis: tuple[Api, ...] = (chat, completions)
    warm_up(services, apis)
    app: ASGIApp = Starlette(
        routes=[
            *_routes(services, apis),
            Route("/v1/ttft/estimate", EstimateEndpoint(services, chat, completions), methods=["POST"]),
        ],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error, Exception: _unforeseen},
    )
    if config.server.api_keys:
        app = ApiKeyGate(app, config.server.api_keys)
    if config.server.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.server.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=_EXPOSED,
        )
    return Observed(app, services.collector)


def _routes(services: Services, apis: tuple[Api, ...]) -> list[Route]:
    admin = Admin(services)

    def limit() -> int:
        return services.max_body_bytes

    return [
        *(Route(api.route, GenerationEndpoint(services, api), methods=["POST"]) for api in apis),
        Route("/v1/models", admin.models),
        Route("/v1/models/{name:path}", admin.model),
        Route("/tokenize", JsonEndpoint(admin.tokenize, limit), methods=["POST"]),
        Route("/detokenize", JsonEndpoint(admin.detokenize, limit), methods=["POST"]),
        Route("/health", admin.health),
        Route("/ready", admin.ready),
        Route("/metrics", admin.metrics),
    ]


class Observed:
    """ASGI middleware, outermost: gives each answer its `x-request-id`, counts it, and logs it at debug level."""

    def __init__(self, app: ASGIApp, collector: Collector) -> None:
        self._app = app
        self._collector = collector

    def refused(self, status: int) -> None:
        """An answer that the connection gave itself, before there was a request to route."""
        self._collector.response(OTHER, status)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = received_at(scope)
        identity = request_id(scope)
        status = 499  # nginx's word for a client that left before the answer began

        async def observed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", identity.encode())]
            await send(message)

        try:
            await self._app(scope, receive, observed_send)
        finally:
            status = scope.get(REFUSED, status)
            route = scope["path"] if scope.get("endpoint") else OTHER
            if route.startswith("/v1/models/"):
                route = "/v1/models/{name}"
            self._collector.response(route, status)
            if access_logger.isEnabledFor(logging.DEBUG):
                milliseconds = (time.monotonic() - received) * 1000
                access_logger.debug(
                    "%s %s %d %.1f ms id=%s", scope["method"], scope["path"], status, milliseconds, identity
                )


def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    messages = {
        404: f"no such route: {request.method} {path[:200]}",
        405: f"{request.method} is not allowed for {path[:200]}",
    }
    allow = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    message = messages.get(error.status_code, str(error.detail))
    return _api_error(request, ApiError(error.status_code, message, headers=tuple(allow)))


def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {name.decode(): value.decode() for name, value in error.headers}
    return Response(error.body(), error.status, headers, media_type="application/json")


def _unforeseen(request: Request, error: Exception) -> Response:
    return _api_error(request, internal_error())
