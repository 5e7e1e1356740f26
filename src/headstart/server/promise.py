"""What a request's TTFT is promised and predicted to be: the SLO that it asks for, and the headers that tell of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from starlette.types import Scope

from headstart.core.errors import SloMiss
from headstart.core.forecast import Forecast
from headstart.server.errors import ApiError, Headers, bad_field

SLO_FIELD = "slo_ttft_ms"
SLO_HEADER = b"x-slo-ttft-ms"
EXPLAIN_HEADER = b"x-headstart-explain"
PREDICTED_HEADER = b"x-headstart-predicted-ttft-ms"
TENANT = "headstart.tenant"  # of an ASGI scope: whose request it is, by its API key
MOST_MS = 86_400_000.0


@dataclass(frozen=True, slots=True)
class Asker:
    """Whose a request is, and what its headers ask for. `slo_ttft`: seconds. `explain`: why the prefix cache missed."""

    tenant: str = ""
    slo_ttft: float | None = None
    explain: bool = False


def asker_of(scope: Scope) -> Asker:
    """Raises `ApiError` 400 for an SLO that is none, and for a switch that is neither on nor off."""
    headers = dict(reversed(scope["headers"]))  # of several of a name, the first
    value = headers.get(SLO_HEADER)
    slo = None
    if value is not None:
        name = SLO_HEADER.decode()
        try:
            milliseconds = float(value)
        except ValueError:
            raise bad_field(name, "is not a number of milliseconds") from None
        slo = slo_seconds(name, milliseconds)
    return Asker(scope.get(TENANT, ""), slo, _switch(EXPLAIN_HEADER.decode(), headers.get(EXPLAIN_HEADER, b"0")))


def _switch(name: str, value: bytes) -> bool:
    match value.strip().lower():
        case b"1" | b"true":
            return True
        case b"0" | b"false" | b"":
            return False
    raise bad_field(name, "must be 1 or 0")


def slo_seconds(name: str, milliseconds: float) -> float:
    """Raises `ApiError` 400 unless the first token can be due then at all."""
    if not math.isfinite(milliseconds) or not 0 < milliseconds <= MOST_MS:
        raise bad_field(name, f"is {milliseconds:g}; it must be more than 0 and at most {MOST_MS:g}")
    return milliseconds / 1000


def predicted_header(seconds: float) -> Headers:
    return ((PREDICTED_HEADER, f"{seconds * 1000:.1f}".encode()),)


def slo_missed(error: SloMiss) -> ApiError:
    wait = max(1, math.ceil(error.retry_after))
    headers = ((b"retry-after", str(wait).encode()), *predicted_header(error.predicted))
    return ApiError(429, str(error), param=SLO_FIELD, code="slo_miss", headers=headers)


def estimate_fields(found: Forecast, before: float, num_prompt_tokens: int, slo: float | None) -> dict[str, object]:
    """The answer of `/v1/ttft/estimate`. `before`: seconds that passed until the engine was asked."""
    predicted = before + found.seconds
    fields: dict[str, object] = {
        "predicted_ttft_ms": round(predicted * 1000, 1),
        "queue_ms": round(found.queue_seconds * 1000, 1),
        "compute_ms": round(found.compute_seconds * 1000, 1),
        "prefill_ms": round(found.prefill_seconds * 1000, 1),
        "requests_ahead": found.num_ahead,
        "prompt_tokens": num_prompt_tokens,
        "cached_tokens": found.num_cached_tokens,
    }
    if slo is not None:
        fields["slo_ttft_ms"] = round(slo * 1000, 3)
        fields["meets_slo"] = predicted <= slo
    return fields
