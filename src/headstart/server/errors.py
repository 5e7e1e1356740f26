"""What a caller is told when a request fails: OpenAI's error body with the right status. Knows nothing of requests."""

from __future__ import annotations

import msgspec

Headers = tuple[tuple[bytes, bytes], ...]

_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """A failure with a status, told in OpenAI's shape. `param` names the field at fault, `code` is for machines."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> bytes:
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": _TYPES.get(self.status, "invalid_request_error"),
                    "param": self.param,
                    "code": self.code,
                }
            }
        )


def bad_field(param: str, message: str, code: str | None = None) -> ApiError:
    """400 that names the field; `message` continues the sentence that begins with its name."""
    return ApiError(400, f"{param} {message}", param=param, code=code)


def bad_json(message: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {message}", code="invalid_json")


def unknown_model(model: str, served: str) -> ApiError:
    return ApiError(
        404,
        f"the model {model[:200]!r} does not exist; this server has {served!r}",
        param="model",
        code="model_not_found",
    )


def queue_full(num_waiting: int, limit: int) -> ApiError:
    return ApiError(
        429,
        f"{num_waiting} requests are waiting and the limit is {limit}; try again later",
        code="queue_full",
        headers=((b"retry-after", b"1"),),
    )


def invalid_http() -> ApiError:
    return ApiError(400, "this is not valid HTTP/1.1; send a request line, headers and a body", code="invalid_http")


def headers_too_large(limit: int) -> ApiError:
    return ApiError(431, f"the headers are longer than {limit} bytes; send less", code="headers_too_large")


def request_timeout(seconds: float) -> ApiError:
    return ApiError(408, f"the request did not arrive within {seconds:g} s", code="request_timeout")


def too_many_connections(limit: int) -> ApiError:
    return ApiError(
        503,
        f"{limit} connections are open and that is the limit; try again later",
        code="too_many_connections",
        headers=((b"retry-after", b"1"),),
    )


def engine_starting() -> ApiError:
    return ApiError(
        503,
        "the model is still being loaded; try again soon",
        code="engine_starting",
        headers=((b"retry-after", b"2"),),
    )


def engine_dead() -> ApiError:
    return ApiError(503, "the engine has stopped; the server must be restarted", code="engine_dead")


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")


def internal_error() -> ApiError:
    """For what we did not foresee: the log has the trace, the caller has not."""
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")
