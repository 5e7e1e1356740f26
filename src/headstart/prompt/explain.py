"""Why one prompt found no more in the prefix cache than it did, told to the one who sent it.

It is compared, token by token, with what the same tenant sent before under the same salt, and then, text by text, with
the nearest of these. Knows neither HTTP nor the cache, only how many tokens were found there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headstart.prompt.chat import ChatPrompt, Part, PromptError
from headstart.prompt.divergence import Divergence, diverge, parting
from headstart.prompt.kinds import HARMLESS, Kind, advice
from headstart.prompt.pieces import pieces_of
from headstart.prompt.sent import Near, Sent, nearest, shared_elsewhere

_LONGEST_COMPARED = 20_000  # characters of a message that another one is recognised by


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that can be said before the prompt began. `num_shared` tokens with the nearest one, `num_held` of them with
    keys and values. `divergence`: None where there is no text to compare."""

    num_tokens: int
    num_shared: int
    num_held: int
    kind: Kind
    divergence: Divergence | None

    def told(self, num_cached: int, block_size: int) -> dict[str, object]:
        """As JSON, once it is known how many tokens were found."""
        kind = self.kind
        if num_cached < min(self.num_held, self.num_tokens - 1) // block_size * block_size:
            kind = Kind.EVICTED
        found = self.divergence
        fields: dict[str, object] = {
            "prompt_tokens": self.num_tokens,
            "cached_tokens": num_cached,
            "nearest_tokens": self.num_shared,
            "kind": kind.value,
            "harmless": kind in HARMLESS,
        }
        if found is not None and kind not in (Kind.SALT, Kind.FIRST):
            fields["where"] = found.label
            fields["characters"] = [found.start, found.end]
            fields["after"] = found.lead
            fields["old"] = found.old_value
            fields["new"] = found.new_value
        where = "" if found is None else f"{found.label}, characters {found.start}-{found.end}"
        fields["advice"] = advice(kind, where)
        return fields


def explain(
    candidates: Sequence[Sent], salt: str, ids: Sequence[int], prompt: ChatPrompt | None, block_size: int
) -> Explanation:
    """Compare a prompt with earlier ones, the latest first. `prompt`: None if it came as ids.

    Takes time in proportion to their length: not for an event loop.
    """
    ties = nearest(candidates, salt, ids, block_size)
    best, divergence = _most_alike(ties, prompt)
    num_shared = best.num_shared if best else 0
    elsewhere = shared_elsewhere(candidates, salt, ids)
    if elsewhere // block_size > num_shared // block_size:
        return Explanation(len(ids), num_shared, best.num_held if best else 0, Kind.SALT, None)
    if best is None:
        return Explanation(len(ids), 0, 0, Kind.FIRST, None)
    kind = _kind(best, len(ids), prompt, divergence, block_size)
    return Explanation(len(ids), num_shared, best.num_held, kind, divergence)


def _kind(best: Near, num_tokens: int, new: ChatPrompt | None, divergence: Divergence | None, block_size: int) -> Kind:
    if divergence is None or new is None:
        return Kind.CONTINUED if best.num_shared == min(best.num_known, num_tokens) else Kind.NEW_TEXT
    if divergence.kind is Kind.CONTINUED:
        # An answer's last token (the end of a turn) may be printed otherwise, or not at all.
        lost = best.num_known - 1 - best.num_shared
        return Kind.RENDERED_OTHERWISE if best.answer is not None and lost >= block_size else Kind.CONTINUED
    if divergence.kind is Kind.TEMPLATE:
        return divergence.kind
    old = _read(best)
    return divergence.kind if old and _shared_behind(old, new) else Kind.NEW_TEXT


def _most_alike(ties: Sequence[Near], new: ChatPrompt | None) -> tuple[Near | None, Divergence | None]:
    """Of those that share as much, the one that holds most of the rest as well; and how `new` differs from it."""
    if not ties:
        return None, None
    if new is None:
        return ties[0], None
    best, text = ties[0], _read(ties[0])
    if len(ties) > 1:
        read = [(near, _read(near)) for near in ties]
        best, text = max(read, key=lambda each: -1 if each[1] is None else _shared_behind(each[1], new))
    return best, None if text is None else diverge(text, new)


def _read(near: Near) -> ChatPrompt | None:
    try:
        return near.sent.read(near.answer)
    except PromptError:
        return None


def _shared_behind(old: ChatPrompt, new: ChatPrompt) -> int:
    """Characters of `new`, behind the place where the two part, that `old` has there too."""
    part, offset = parting(old, new)
    theirs, ours = _rest(old.parts, part, offset), _rest(new.parts, part, offset)
    whole = set(theirs)
    keys = {piece.key for text in theirs for piece in pieces_of(text)}
    shared = 0
    for text in ours:
        pieces = () if text in whole else pieces_of(text)
        shared += sum(piece.length for piece in pieces if piece.key in keys) + (len(text) if text in whole else 0)
    return shared


def _rest(parts: Sequence[Part], part: int, offset: int) -> list[str]:
    texts = [each.text[: offset + _LONGEST_COMPARED] for each in parts[part:]]
    return [texts[0][offset:], *texts[1:]] if texts else []
