"""Prompts that count exactly so many tokens at a server, each unlike every other from its first words on.

A prompt is a list of words that are one token each, after a fixed first word. What the template adds is measured, not
assumed. The words come from a generator that the system's entropy seeds in every run, so that no earlier run's prompts
are in the server's cache. Knows what a prompt is made of; sends nothing itself.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from headstart.bench.options import BenchError
from headstart.bench.words import LETTERS, WORDS

FIRST = "The"  # begins every message, because a first word has no leading space and may count otherwise
LEAD_WORDS = 8  # words in the system message of a prompt that has no shared one: 60 bits that no two prompts share
MIN_WORDS = 12  # a smaller vocabulary than this could repeat itself

Count = Callable[[str], Awaitable[int]]  # tokens of a text, up to a constant


@dataclass(frozen=True, slots=True)
class PromptShape:
    """What calibration found. `overhead`: tokens of a prompt beyond its words. `has_system`: system messages work.

    `exact`: the server counted what was predicted; if not, lengths are approximate.
    """

    words: tuple[str, ...]
    overhead: int
    has_system: bool
    exact: bool


async def single_token_words(count: Count) -> tuple[str, ...]:
    """The words that add exactly one token each, found by halving what does not add up. `BenchError` if too few."""
    base = await count(FIRST)

    async def keep(words: Sequence[str]) -> tuple[str, ...]:
        if not words:
            return ()
        if await count(" ".join((FIRST, *words))) - base == len(words):
            return tuple(words)
        if len(words) == 1:
            return ()
        half = len(words) // 2
        return (*await keep(words[:half]), *await keep(words[half:]))

    found = await keep(WORDS)
    if len(found) < MIN_WORDS:
        found += await keep([letter for letter in LETTERS if letter not in found])
    if len(found) < MIN_WORDS:
        raise BenchError(
            f"only {len(found)} of the bench's words are one token at this server, so prompts of a given length cannot "
            "be made; does its usage.prompt_tokens (or /tokenize) count tokens?"
        )
    return found


class PromptMaker:
    """Makes the word lists of prompts for one server. Owns the random numbers; one a run and server."""

    def __init__(self, shape: PromptShape, rng: random.Random) -> None:
        self.shape = shape
        self._rng = rng
        self._salt = rng.getrandbits(64)

    @property
    def min_tokens(self) -> int:
        """The shortest prompt that is still unlike all others."""
        return self.shape.overhead + LEAD_WORDS + 1

    def unique(self, num_words: int) -> list[str]:
        """So many fresh words."""
        return self._rng.choices(self.shape.words, k=num_words)

    def block(self, name: str, num_words: int) -> list[str]:
        """The first words of a text that is the same in all of this run for the same `name`, and no other's."""
        return random.Random(f"{self._salt}:{name}").choices(self.shape.words, k=num_words)

    def num_words(self, prompt_tokens: int) -> int:
        """Words of a prompt that counts `prompt_tokens`; never fewer than `min_tokens` needs."""
        return max(prompt_tokens, self.min_tokens) - self.shape.overhead

    def messages(self, words: Sequence[str], *, system_words: int = LEAD_WORDS) -> list[dict[str, str]]:
        """Chat messages: the first `system_words` words as the system message, so that prompts differ early."""
        if not self.shape.has_system:
            return [{"role": "user", "content": text_of(words)}]
        return [
            {"role": "system", "content": text_of(words[:system_words])},
            {"role": "user", "content": text_of(words[system_words:])},
        ]


def text_of(words: Sequence[str]) -> str:
    return " ".join((FIRST, *words))
