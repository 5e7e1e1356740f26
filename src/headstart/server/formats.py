"""What the two generation APIs have in common for whoever serves them, and what sets them apart: the `Api` protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from headstart.metrics.ledger import Ledger
from headstart.server.choice import Delta
from headstart.server.logprobs import TokenEntry
from headstart.server.params import Generation, Limits
from headstart.server.timing import in_milliseconds


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that open an answer and each of its chunks."""

    id: str
    created: int
    model: str
    fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(slots=True)
class Whole:
    """A finished choice, put together from its deltas."""

    index: int
    text: str = ""
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.entries += delta.entries
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class ChunkEncoder(Protocol):
    def chunk(self, delta: Delta) -> bytes:
        """One event."""
        ...

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The event without choices."""
        ...


class Api(Protocol):
    """One of the APIs that generate text."""

    route: str
    id_prefix: str
    prompt_field: str

    def parse(self, body: bytearray, limits: Limits) -> tuple[str | None, Generation]:
        """(the model's name as given, what is asked for). Raises `ApiError` 400."""
        ...

    def encoder(self, head: Head, asked: Generation) -> ChunkEncoder: ...

    def choice(self, whole: Whole, asked: Generation) -> dict[str, Any]: ...

    def object(self) -> str:
        """The name of a whole answer's kind."""
        ...


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, ledger: Ledger | None, predicted_ttft: float
) -> dict[str, Any]:
    """OpenAI's usage object; `ttft_ms`, `predicted_ttft_ms` and `ttft_ledger` (milliseconds by part) are ours, as is
    `explain` where it is asked for."""
    fields: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if ledger is not None:
        fields["ttft_ms"] = round(sum(seconds for _, seconds in ledger) * 1000, 3)
        fields["predicted_ttft_ms"] = round(predicted_ttft * 1000, 3)
        fields["ttft_ledger"] = in_milliseconds(ledger)
    return fields
