"""The incremental detokenizer by example: what leaves with which token."""

from __future__ import annotations

import pytest

from headstart.text import Detokenizer, Tokenizer
from tests.fixtures.tiny_vocab import byte_level_tokenizer, spm_tokenizer


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def pieces(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.finish()]


def test_a_character_leaves_when_it_is_whole() -> None:
    tokenizer = byte_level_tokenizer()
    assert pieces(Detokenizer(tokenizer, ()), list("é🙂".encode())) == ["", "é", "", "", "", "🙂", ""]


def test_an_unfinished_character_at_the_end_is_one_replacement_mark() -> None:
    assert pieces(Detokenizer(byte_level_tokenizer(), ()), list("🙂".encode()[:3])) == ["", "", "", "\ufffd"]


def test_a_character_broken_off_leaves_with_the_byte_that_breaks_it() -> None:
    data = [*"🙂".encode()[:2], ord("a")]
    assert pieces(Detokenizer(byte_level_tokenizer(), ()), data) == ["", "", "\ufffda", ""]


def test_sentencepiece_byte_tokens_are_joined_too() -> None:
    tokenizer = spm_tokenizer()
    tokens = ids_of(tokenizer, "🙂a")
    assert pieces(Detokenizer(tokenizer, ()), tokens) == ["", "", "", "", "🙂", "a", ""]


def test_the_leading_space_is_dropped_at_the_start_of_a_text_only() -> None:
    tokenizer = spm_tokenizer()
    (word,) = ids_of(tokenizer, "ab")
    assert Detokenizer(tokenizer, ()).push([word]) == "ab"
    assert Detokenizer(tokenizer, [1]).push([word]) == "ab"  # <s> shows nothing
    assert Detokenizer(tokenizer, [1], skip_special_tokens=False).push([word]) == " ab"
    assert Detokenizer(tokenizer, ids_of(tokenizer, "b")).push([word]) == " ab"
    assert Detokenizer(tokenizer, ids_of(tokenizer, "")).push([word, word]) == "ab ab"


def test_special_tokens_are_shown_or_not() -> None:
    tokenizer = byte_level_tokenizer()
    end = tokenizer.eos_token_ids[0]
    tokens = [*ids_of(tokenizer, "hello"), end]
    assert Detokenizer(tokenizer, ()).push(tokens) == "hello"
    assert Detokenizer(tokenizer, (), skip_special_tokens=False).push(tokens) == "hello<|im_end|>"
    assert Detokenizer(tokenizer, ()).push(ids_of(tokenizer, "<think>")) == "<think>"  # added, but not special


def test_a_stop_string_over_token_borders_never_leaks() -> None:
    tokenizer = byte_level_tokenizer()
    detokenizer = Detokenizer(tokenizer, (), ("User:",))
    assert pieces(detokenizer, list(b"ab Use")) == ["a", "b", " ", "", "", "", "Use"]
    detokenizer = Detokenizer(tokenizer, (), ("User:",))
    assert pieces(detokenizer, list(b"ab UseUser: x")) == ["a", "b", " ", "", "", "", "Use", *[""] * 7]
    assert detokenizer.stopped == "User:"


def test_only_what_may_become_a_stop_string_waits() -> None:
    detokenizer = Detokenizer(byte_level_tokenizer(), (), ("aab",))
    assert pieces(detokenizer, list(b"aaac")) == ["", "", "a", "aac", ""]


def test_text_after_the_stop_string_in_the_same_token_is_gone() -> None:
    tokenizer = byte_level_tokenizer()
    detokenizer = Detokenizer(tokenizer, (), ("ell",))
    assert detokenizer.push(ids_of(tokenizer, "hello")) == "h"
    assert detokenizer.stopped == "ell"
    kept = Detokenizer(tokenizer, (), ("ell",), include_stop=True)
    assert kept.push(ids_of(tokenizer, "hello")) == "hell"


def test_the_stop_string_that_is_complete_first_wins_and_then_the_longest() -> None:
    tokenizer = byte_level_tokenizer()
    first = Detokenizer(tokenizer, (), ("hello", "he"))
    assert first.push(ids_of(tokenizer, "hello")) == ""
    assert first.stopped == "he"
    longest = Detokenizer(tokenizer, (), ("lo", "llo"))
    assert longest.push(ids_of(tokenizer, "hello")) == "he"
    assert longest.stopped == "llo"


def test_a_stop_string_within_a_character_that_never_ends() -> None:
    detokenizer = Detokenizer(byte_level_tokenizer(), (), ("\ufffd",))
    assert pieces(detokenizer, list(b"a\xf0")) == ["a", "", ""]
    assert detokenizer.stopped == "\ufffd"


def test_a_prompt_that_ends_inside_a_character_is_continued() -> None:
    tokenizer = byte_level_tokenizer()
    start, end = list("你".encode()[:2]), list("你".encode()[2:])
    assert pieces(Detokenizer(tokenizer, start), [*end, ord("a")]) == ["你", "a", ""]
    assert Detokenizer(tokenizer, start).finish() == ""  # the prompt's bytes are not the completion's
    assert Detokenizer(tokenizer, [*b"abcdefgh", *start]).push(end) == "你"


def test_ids_without_a_token_are_nothing() -> None:
    detokenizer = Detokenizer(byte_level_tokenizer(), ())
    assert detokenizer.push([99_999, -1, 1 << 40]) == ""
    assert detokenizer.finish() == ""


def test_an_empty_stop_string_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError):
        Detokenizer(byte_level_tokenizer(), (), ("",))
