"""Which requests of a log could have found more in the prefix cache, why they did not, and what it cost.

Requests are taken in the order of the log, against an endless cache. For each one: what it shares with the beginning of
any earlier request is cached. What it shares with a similar earlier one behind the place where the two part is lost,
and what differs there is the breaker. Tokens are counted text by text, so they are off by a few where texts meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from headstart.core.cost import CostModel
from headstart.prompt.chat import ChatPrompt
from headstart.prompt.divergence import Divergence, diverge, parting
from headstart.prompt.history import History
from headstart.prompt.kinds import HARMLESS, Kind

_MAX_COUNTS = 200_000  # texts whose token count is remembered
_LEAST_DENSE = 0.5  # how much, of what lies between the place and the end of what is lost, must be what is lost
_SAME_PLACE = 12  # characters before it that tell one breaker from another
# One parting by these is another application, or a new release of its prompt; what breaks caches does it again.
_ONCE_IS_NEWS = frozenset({Kind.SYSTEM_CHANGED, Kind.VALUE, Kind.VERSION, Kind.TOOLS_CHANGED})
# Told apart by the text before them; other kinds are one breaker for all messages of a role.
_VALUES = frozenset(
    {Kind.UUID, Kind.TIMESTAMP, Kind.HEX_ID, Kind.VERSION, Kind.COUNTER, Kind.NONCE, Kind.VALUE, Kind.SYSTEM_CHANGED}
)


class TokenCounter:
    """Tokens of texts, each counted once. `frame`: tokens that the template adds to a message."""

    def __init__(self, encode: Callable[[str], Sequence[int]], frame: int = 4) -> None:
        self._encode = encode
        self._counts: dict[int, int] = {}
        self.frame = frame

    def __call__(self, text: str) -> int:
        """Raises `ValueError` for text that is no valid Unicode."""
        key = hash(text)
        count = self._counts.get(key)
        if count is None:
            if len(self._counts) >= _MAX_COUNTS:
                self._counts.clear()
            count = self._counts[key] = len(self._encode(text))
        return count

    def of(self, prompt: ChatPrompt) -> int:
        return sum(self(part.text) + self.frame for part in prompt.parts)


@dataclass(frozen=True, slots=True)
class Prices:
    """Money for a million tokens, in whatever currency."""

    input: float
    cached: float = 0.0

    def lost(self, tokens: int) -> float:
        """What tokens cost more for not being cached."""
        return tokens * (self.input - self.cached) / 1_000_000


@dataclass(slots=True)
class Breaker:
    """One thing that keeps prefixes from being found again. `lines`: of the log, the earlier and the later request."""

    divergence: Divergence
    lines: tuple[int, int]
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    money: float | None = None

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        found = self.divergence
        return {
            "kind": found.kind.value,
            "where": found.label,
            "characters": [found.start, found.end],
            "lines": list(self.lines),
            "after": found.lead,
            "old": found.old_value,
            "new": found.new_value,
            "requests": self.requests,
            "lost_tokens": self.tokens,
            "lost_ms": round(self.seconds * 1000, 3),
            "lost_money": self.money,
            "advice": found.advice,
        }


@dataclass(slots=True)
class LintReport:
    """What a log holds, in tokens; breakers from the dearest down."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    lost_tokens: int = 0
    lost_seconds: float = 0.0
    lost_money: float | None = None
    breakers: list[Breaker] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "lost_tokens": self.lost_tokens,
            "lost_ms": round(self.lost_seconds * 1000, 3),
            "lost_money": self.lost_money,
            "breakers": [breaker.as_dict() for breaker in self.breakers],
        }


class Linter:
    """Takes requests one by one. Memory is bounded by what `History` remembers."""

    def __init__(
        self,
        count: TokenCounter,
        costs: CostModel,
        *,
        block_size: int = 16,
        min_tokens: int = 32,
        prices: Prices | None = None,
    ) -> None:
        self._count = count
        self._costs = costs
        self._block_size = block_size
        self._min_tokens = min_tokens
        self._prices = prices
        self._history = History()
        self._salts: set[str] = set()
        self._breakers: dict[tuple[Kind, str, str], Breaker] = {}
        self._report = LintReport()

    def add(self, line: int, prompt: ChatPrompt) -> None:
        """The request in this line of the log. Raises `ValueError` for text that no tokenizer takes."""
        total = self._count.of(prompt)
        cached = self._history.cached(prompt)
        num_cached = self._whole_blocks(self._tokens_before(prompt, *cached))
        self._report.requests += 1
        self._report.prompt_tokens += total
        self._report.cached_tokens += min(num_cached, total)
        self._salts.add(prompt.salt)
        if cached[0] < len(prompt.parts):
            self._look_for_breaker(line, prompt, cached, num_cached)
        self._history.add(line, prompt)

    def report(self) -> LintReport:
        """What was found until now."""
        breakers = [each for each in self._breakers.values() if not self._is_harmless(each)]
        breakers.sort(key=lambda each: (-each.tokens, each.lines))
        report = self._report
        report.breakers = breakers
        report.lost_tokens = sum(each.tokens for each in breakers)
        report.lost_seconds = sum(each.seconds for each in breakers)
        report.lost_money = None if self._prices is None else self._prices.lost(report.lost_tokens)
        return report

    def _is_harmless(self, breaker: Breaker) -> bool:
        """A salt that comes back keeps tenants apart, as it is meant to."""
        kind = breaker.divergence.kind
        if kind is Kind.SALT:
            return len(self._salts) * 2 <= self._report.requests
        return kind in _ONCE_IS_NEWS and breaker.requests == 1

    def _look_for_breaker(self, line: int, prompt: ChatPrompt, cached: tuple[int, int], num_cached: int) -> None:
        best: tuple[int, int] | None = None
        for number in self._history.similar(prompt):
            lost = self._lost(self._history.prompt(number), prompt, cached)
            if best is None or lost > best[0]:
                best = lost, number
        if best is None:
            return
        lost = self._whole_blocks(num_cached + best[0]) - num_cached
        if lost < max(self._min_tokens, self._block_size):
            return
        divergence = diverge(self._history.prompt(best[1]), prompt)
        if divergence.kind not in HARMLESS:
            self._record(divergence, (best[1], line), num_cached, lost)

    def _record(self, divergence: Divergence, lines: tuple[int, int], num_cached: int, lost: int) -> None:
        key = _place(divergence)
        breaker = self._breakers.setdefault(key, Breaker(divergence, lines))
        breaker.requests += 1
        breaker.tokens += lost
        breaker.seconds += self._costs.prefill_seconds(num_cached, lost)
        if self._prices is not None:
            breaker.money = (breaker.money or 0.0) + self._prices.lost(lost)

    def _lost(self, old: ChatPrompt, new: ChatPrompt, cached: tuple[int, int]) -> int:
        """Tokens of `new` behind what is cached that `old` holds too, behind the place where the two part."""
        place = max(cached, parting(old, new))
        lost = region = tokens = 0
        passed = 0  # characters since the place
        for length, shared, share in self._shared(old, new, parting(old, new), place):
            passed += length
            if shared:
                lost, region = lost + shared, passed
                tokens += share
        return tokens if region and lost >= region * _LEAST_DENSE else 0

    def _shared(
        self, old: ChatPrompt, new: ChatPrompt, left: tuple[int, int], place: tuple[int, int]
    ) -> Iterator[tuple[int, int, int]]:
        """Behind the place, part by part and piece by piece: characters, how many of them are shared, in tokens."""
        theirs = old.parts[left[0] :]
        texts = {part.text for part in theirs[bool(left[1]) :]}
        known = self._piece_keys([part.text for part in theirs], left[1])
        for index in range(place[0], len(new.parts)):
            text = new.parts[index].text
            start = place[1] if index == place[0] else 0
            if not start and text in texts:
                yield len(text), len(text), self._count(text) + self._count.frame
                continue
            end = start
            for piece in self._history.text(text).pieces:
                if piece.start >= start and piece.key in known:
                    behind = piece.start + piece.length
                    # The blank belongs to the next word's token.
                    yield behind - end, piece.length, self._count(text[piece.start : behind].rstrip(" "))
                    end = behind
            yield len(text) - end, 0, 0

    def _piece_keys(self, texts: Sequence[str], start: int) -> set[int]:
        keys = set()
        for index, text in enumerate(texts):
            keys |= {piece.key for piece in self._history.text(text).pieces if index or piece.start >= start}
        return keys

    def _tokens_before(self, prompt: ChatPrompt, part: int, offset: int) -> int:
        whole = sum(self._count(each.text) + self._count.frame for each in prompt.parts[:part])
        return whole + (self._count(prompt.parts[part].text[:offset]) if offset else 0)

    def _whole_blocks(self, tokens: int) -> int:
        return tokens // self._block_size * self._block_size


def _place(divergence: Divergence) -> tuple[Kind, str, str]:
    """The same for one breaker in whatever requests."""
    if divergence.kind in _VALUES and not divergence.is_tool:
        inside = divergence.offset - divergence.start
        lead = divergence.before[: max(0, len(divergence.before) - inside)]
        return divergence.kind, divergence.label, lead[-_SAME_PLACE:] if divergence.part == 0 else ""
    return divergence.kind, divergence.role, ""


def lint(prompts: Iterable[ChatPrompt], linter: Linter) -> LintReport:
    """All of them, numbered from 1."""
    for line, prompt in enumerate(prompts, 1):
        linter.add(line, prompt)
    return linter.report()
