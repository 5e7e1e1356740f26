"""API keys: the gate in front of everything but the probes. Where keys come from is the settings' matter.

Keys are compared as SHA-256 digests in constant time, all of them each time, so that neither a key's length nor its
place in the list shows in the answer's timing.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from headstart.server.errors import ApiError
from headstart.server.http import send_error
from headstart.server.promise import TENANT

OPEN_PATHS = frozenset({"/health", "/ready"})


class ApiKeyGate:
    """ASGI middleware: 401 for requests without a known key, except for `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        assert keys, "an open server has no gate"
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        tenant = self._tenant(scope["headers"])
        if tenant is not None:
            scope[TENANT] = tenant
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "a valid API key is required: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers=((b"www-authenticate", b"Bearer"),),
        )
        await send_error(send, error)

    def _tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Who has this key, by its place in the list; None: nobody."""
        value = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = value.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return str(matches.index(True)) if any(matches) else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
