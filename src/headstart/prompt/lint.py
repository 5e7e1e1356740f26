"""Finds what breaks the prefix cache in a file of requests, by replaying it into a cache that is only an index.

Owns what counts as a breaker, what each costs, and how they are put together. Knows neither files nor terminals.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from headstart.core.cost import CostModel
from headstart.prompt.divergence import Divergence, as_fields, diverge
from headstart.prompt.index import PromptIndex
from headstart.prompt.kinds import WORDS, Kind
from headstart.prompt.rendered import Prompt, common_prefix

MAX_LINES_KEPT = 100  # of each breaker
MAX_BYTES = 256 * 1024 * 1024  # of prompts that are remembered to compare with
_LEAST_BLOCKS = 2  # wasted; less is what any two prompts lose
# What changes once is a new version; what changes again is a breaker.
_VERSIONED: frozenset[Kind] = frozenset({"system_changed", "tools_changed", "parameters", "value"})
_MIN_VERSIONS = 2


@dataclass(frozen=True, slots=True)
class Prices:
    """Money for a million prompt tokens, computed and from the cache."""

    input: float
    cached: float = 0.0

    def of_waste(self, num_tokens: int) -> float:
        return num_tokens * (self.input - self.cached) / 1e6


@dataclass(slots=True)
class Breaker:
    """One cause, wherever it occurred. Waste: prompt tokens that would have been hits without it, and the seconds of
    computing them."""

    example: Divergence
    count: int = 0
    wasted_tokens: int = 0
    wasted_seconds: float = 0.0
    lines: list[int] = field(default_factory=list)

    @property
    def kind(self) -> Kind:
        return self.example.kind

    def add(self, line: int, tokens: int, seconds: float) -> None:
        self.count += 1
        self.wasted_tokens += tokens
        self.wasted_seconds += seconds
        if len(self.lines) < MAX_LINES_KEPT:
            self.lines.append(line)


@dataclass(frozen=True, slots=True)
class LintReport:
    """What a file came to. Tokens are prompt tokens; `cached_tokens` would come from a cache of the simulated size."""

    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    breakers: tuple[Breaker, ...]  # the most expensive first

    @property
    def wasted_tokens(self) -> int:
        return sum(breaker.wasted_tokens for breaker in self.breakers)

    def as_dict(self, prices: Prices | None) -> dict[str, Any]:
        """For JSON; times in milliseconds."""
        return {
            "requests": self.num_requests,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "wasted_tokens": self.wasted_tokens,
            "breakers": [_as_dict(breaker, prices) for breaker in self.breakers],
        }


def _as_dict(breaker: Breaker, prices: Prices | None) -> dict[str, Any]:
    fields = {
        "requests": breaker.count,
        "lines": breaker.lines,
        "wasted_tokens": breaker.wasted_tokens,
        "wasted_ms": round(breaker.wasted_seconds * 1000, 3),
    }
    if prices is not None:
        fields["wasted_money"] = prices.of_waste(breaker.wasted_tokens)
    return as_fields(breaker.example) | fields


class Linter:
    """Feed it prompts in the order in which they were sent."""

    def __init__(self, costs: CostModel, *, block_size: int, cache_tokens: int) -> None:
        """`cache_tokens`: what the simulated cache holds, the least recently used blocks leave first."""
        self._costs = costs
        self._block_size = block_size
        self._index = PromptIndex(
            block_size=block_size, max_blocks=max(1, cache_tokens // block_size), max_bytes=MAX_BYTES
        )
        self._breakers: dict[tuple[Any, ...], Breaker] = {}
        self._num_requests = self._prompt_tokens = self._cached_tokens = 0

    def feed(self, prompt: Prompt, line: int) -> None:
        match, entry = self._index.add(prompt)
        entry.served = True
        self._num_requests += 1
        self._prompt_tokens += len(prompt.ids)
        self._cached_tokens += match.num_tokens
        nearest = match.nearest(prompt)
        if nearest is None:
            return
        divergence = diverge(nearest.prompt, prompt)
        reached = self._evicted(nearest.prompt, prompt, match.num_tokens, line)
        if divergence is not None and divergence.kind != "content":
            self._note(divergence, prompt, match.num_tokens, reached, line)

    def _evicted(self, old: Prompt, new: Prompt, num_cached: int, line: int) -> int:
        """Note what had been cached and is not any more; the tokens that the nearest prompt would have given."""
        if old.request.salt != new.request.salt:
            return num_cached
        common = min(common_prefix(old.ids, new.ids), len(new.ids) - 1)
        reached = max(common // self._block_size * self._block_size, num_cached)
        if reached - num_cached >= _LEAST_BLOCKS * self._block_size:
            found = Divergence("evicted", "cache", num_cached, 0)
            self._add(("evicted",), found, line, num_cached, reached - num_cached)
        return reached

    def _note(self, found: Divergence, prompt: Prompt, num_cached: int, reached: int, line: int) -> None:
        """`reached`: tokens of the beginning that are not wasted by this."""
        per_character = len(prompt.ids) / max(1, len(prompt.text))
        achievable = min(found.token + int(found.shared * per_character), len(prompt.ids) - 1)
        wasted = (achievable - max(reached, num_cached)) // self._block_size * self._block_size
        if wasted < _LEAST_BLOCKS * self._block_size:
            return
        place = found.message if found.message == 0 else None if found.message is None else "later"
        key = (found.kind, found.part, found.role, place, found.before[-12:] if found.end > found.start else "")
        self._add(key, found, line, max(reached, num_cached), wasted)

    def _add(self, key: tuple[Any, ...], found: Divergence, line: int, start: int, wasted: int) -> None:
        breaker = self._breakers.setdefault(key, Breaker(found))
        breaker.add(line, wasted, self._costs.prefill_seconds(start, wasted))

    def report(self) -> LintReport:
        return LintReport(
            self._num_requests, self._prompt_tokens, self._cached_tokens, tuple(_ranked(self._breakers.values()))
        )


def _ranked(breakers: Iterable[Breaker]) -> list[Breaker]:
    counted = [breaker for breaker in breakers if breaker.kind not in _VERSIONED or breaker.count >= _MIN_VERSIONS]
    return sorted(counted, key=lambda breaker: (-breaker.wasted_seconds, -breaker.wasted_tokens, breaker.lines[0]))


def title_of(breaker: Breaker) -> str:
    """`a date or time in message 0 (system)`."""
    example = breaker.example
    name = WORDS[example.kind].what
    return f"{name} in {example.where.split(',')[0]}" if example.part not in ("salt", "cache") else name
