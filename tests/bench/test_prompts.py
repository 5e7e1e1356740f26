"""Prompts of exact lengths at servers that count in their own ways."""

from __future__ import annotations

import random

import pytest

from headstart.bench.options import BenchError
from headstart.bench.prompts import FIRST, LEAD_WORDS, PromptMaker, PromptShape, single_token_words, text_of
from headstart.bench.words import WORDS


class Vocabulary:
    """Counts tokens like a BPE whose whole words are `known`; other words cost a token a letter."""

    def __init__(self, known: set[str]) -> None:
        self.known = known
        self.num_calls = 0

    async def count(self, text: str) -> int:
        self.num_calls += 1
        return 3 + sum(1 if word in self.known else len(word) + 1 for word in text.split())


async def test_an_ordinary_vocabulary_needs_two_questions() -> None:
    vocabulary = Vocabulary({FIRST, *WORDS})
    assert await single_token_words(vocabulary.count) == WORDS
    assert vocabulary.num_calls == 2


async def test_words_that_are_several_tokens_are_found_and_dropped() -> None:
    odd = set(WORDS[5:200:40])
    vocabulary = Vocabulary({FIRST, *WORDS} - odd)
    assert set(await single_token_words(vocabulary.count)) == set(WORDS) - odd
    assert vocabulary.num_calls < 120


async def test_a_tiny_vocabulary_falls_back_to_letters() -> None:
    letters = set("bcdefghijklmnopq")
    assert set(await single_token_words(Vocabulary({FIRST, *letters}).count)) == letters


async def test_a_server_that_does_not_count_tokens_is_refused() -> None:
    async def always_seven(text: str) -> int:
        return 7

    with pytest.raises(BenchError, match="does its usage"):
        await single_token_words(always_seven)


def maker(*, has_system: bool = True, overhead: int = 30, seed: int = 0) -> PromptMaker:
    return PromptMaker(PromptShape(WORDS, overhead, has_system, exact=True), random.Random(seed))


def test_no_two_prompts_begin_alike() -> None:
    prompts = maker()
    seen = {tuple(prompts.unique(50)[:LEAD_WORDS]) for _ in range(2000)}
    assert len(seen) == 2000


def test_named_blocks_are_equal_in_a_run_and_differ_between_runs_and_names() -> None:
    ours, other_run = maker(seed=1), maker(seed=2)
    assert ours.block("a", 20)[:12] == ours.block("a", 12)
    assert ours.block("a", 20) != ours.block("b", 20)
    assert ours.block("a", 20) != other_run.block("a", 20)


def test_words_and_overhead_make_the_length() -> None:
    prompts = maker(overhead=30)
    assert prompts.num_words(512) + 30 == 512
    assert prompts.num_words(1) == LEAD_WORDS + 1  # shorter could not be told apart from others


def test_messages_differ_from_their_first_words_on() -> None:
    words = [str(number) for number in range(20)]
    system, user = maker().messages(words)
    assert (system["role"], system["content"]) == ("system", text_of(words[:LEAD_WORDS]))
    assert (user["role"], user["content"]) == ("user", text_of(words[LEAD_WORDS:]))
    assert maker(has_system=False).messages(words) == [{"role": "user", "content": text_of(words)}]
