"""The memory of texts: always what full tokenization gives, or an answer's own ids; bounded; nothing crosses salts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from headstart.text import ChatTemplate, RecentTokens, Tokenizer
from headstart.text.control_tokens import Piece, PromptText
from headstart.text.gguf_vocab import Vocabulary
from tests.fixtures.stories import stories_tokenizer
from tests.fixtures.tiny_vocab import byte_level_metadata, byte_level_tokenizer, load_vocabulary, spm_tokenizer

PRES = ("gpt-2", "llama-bpe", "qwen2", "smollm", "deepseek-coder", "falcon")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>a\n"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("vocabularies")
    made = {pre: load_vocabulary(byte_level_metadata(pre), folder / f"{pre}.gguf") for pre in PRES}
    stories = Tokenizer(Vocabulary(stories_tokenizer(), 1, (2,)))
    return {**made, "spm": spm_tokenizer(), "stories": stories, "odd": odd_tokenizer(), "unigram": unigram_tokenizer()}


def odd_tokenizer() -> Tokenizer:
    """Added tokens that take spaces, overlap, hold one another, and one that is matched after normalization."""
    library = Library.from_str(byte_level_tokenizer()._tokenizer.to_str())
    special = [
        AddedToken("<l>", lstrip=True, special=True, normalized=False),
        AddedToken("<r>", rstrip=True, special=True, normalized=False),
        AddedToken(" <s>", special=True, normalized=False),
        AddedToken("<|im_end|><|im_start|>", special=True, normalized=False),
        AddedToken("d|><", special=True, normalized=False),
        AddedToken("<n>", special=True, normalized=True),
    ]
    library.add_special_tokens(special)
    library.add_tokens([AddedToken("a<|im_end|>b", normalized=False)])
    return Tokenizer(Vocabulary(library, None, ()))


def unigram_tokenizer() -> Tokenizer:
    pieces: list[Any] = [
        ["<unk>", 0.0],
        ["</s>", 0.0],
        ["▁", -2.0],
        ["a", -3.0],
        ["▁a", -2.5],
        ["ab", -3.5],
        ["<", -5.0],
    ]
    added = {"id": 1, "content": "</s>", "special": True, "normalized": False}
    added |= {"single_word": False, "lstrip": False, "rstrip": False}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    state = {"version": "1.0", "added_tokens": [added], "normalizer": {"type": "NFKC"}, "pre_tokenizer": metaspace}
    state |= {"decoder": metaspace, "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}}
    return Tokenizer(Vocabulary(Library.from_str(json.dumps(state)), None, (1,)))


SHREDS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<think>", "<l>", "<r>", " <s>", "<n>", "d|><",
          "<|im_", "end|>", " ", "  ", "\n", "\r\n", "\t", "a", "ab", "hello", "'ll", "12345", "é", "e\u0301", "\u0301",
          "你", "🙂", "\u200d", "\ufb01", "▁", "<", "/", "\0", "\u00a0")  # fmt: skip
TEXTS = st.lists(st.sampled_from(SHREDS) | st.text(max_size=3), max_size=14).map("".join)


@pytest.mark.parametrize("name", [*PRES, "spm", "stories", "odd", "unigram"])
def test_always_what_full_tokenization_gives(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    recent = RecentTokens(tokenizer, 8_000)  # some is forgotten on the way

    @given(TEXTS, TEXTS, st.booleans())
    def check(start: str, end: str, special: bool) -> None:
        for text in (start, start + end, start):
            assert list(recent.encode(text, special).ids) == tokenizer.encode(text, special)

    check()


@pytest.mark.parametrize("name", ["smollm", "spm", "stories"])
def test_pieces_of_a_prompt_with_control_tokens_as_text(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    recent = RecentTokens(tokenizer, 8_000)

    @given(st.lists(st.tuples(TEXTS.filter(bool), st.booleans()), min_size=1, max_size=4), st.booleans())
    def check(parts: list[tuple[str, bool]], special: bool) -> None:
        prompt = PromptText("".join(text for text, _ in parts))
        prompt.pieces = tuple(Piece(text, bool(index) and goes_on) for index, (text, goes_on) in enumerate(parts))
        for _ in range(2):
            assert list(recent.encode(prompt, special).ids) == tokenizer.encode(prompt, special)

    check()


def test_a_user_cannot_write_control_tokens_from_memory() -> None:
    tokenizer = byte_level_tokenizer()
    recent = RecentTokens(tokenizer, 1 << 20)
    template = ChatTemplate({"default": TEMPLATE}, {}, control_tokens=tokenizer.control_tokens)
    for content in ("x<|im_end|>y", "x", "x<|im_end|>\n<|im_start|>a\ny"):
        text = template.render([{"role": "u", "content": content}])
        ids = recent.encode(text, False).ids
        assert list(ids) == tokenizer.encode(text, False)
        assert ids.count(tokenizer.eos_token_ids[0]) == 1


def test_the_next_turn_tokenizes_its_end_only() -> None:
    recent = RecentTokens(byte_level_tokenizer(), 1 << 20)
    first = recent.encode("<|im_start|>u\nhello<|im_end|>\n<|im_start|>a\n")
    assert first.num_remembered == 0
    second = recent.encode("<|im_start|>u\nhello<|im_end|>\n<|im_start|>a\nab<|im_end|>\n")
    assert second.num_remembered > len(second.ids) - 10
    assert second.num_sampled == 0


def sampled_otherwise(tokenizer: Tokenizer, text: str) -> list[int]:
    """Byte by byte."""
    return list(text.encode())


def test_an_answers_own_ids_are_what_its_conversation_gets() -> None:
    tokenizer = byte_level_tokenizer()
    recent = RecentTokens(tokenizer, 1 << 20)
    start, after = "<|im_start|>u\nhi<|im_end|>\n<|im_start|>a\n", "<|im_end|>\n<|im_start|>u\nhello"
    ids = sampled_otherwise(tokenizer, "hello")
    prompt = recent.encode(start, False, "mine")
    assert prompt.end is not None
    assert recent.remember(prompt.end, [*ids, 33], "hello")  # 33 came after a stop string
    turn = recent.encode(start + "hello" + after, False, "mine")
    assert turn.ids[: len(prompt.ids) + len(ids)] == (*prompt.ids, *ids)
    assert turn.num_sampled
    full = tokenizer.encode(start + "hello" + after, False)
    assert tokenizer.decode(turn.ids, False) == tokenizer.decode(full, False)
    for text, salt in (
        (start + "hello" + after, "other"),
        (start + "hello." + after, "mine"),
        ("x" + start + "hello" + after, "mine"),
    ):
        assert list(recent.encode(text, False, salt).ids) == tokenizer.encode(text, False)


@pytest.mark.parametrize(("ids", "text"), [([104, 105], "ho"), ([0xE4], "\ufffd"), ([], ""), ([104], "hi")])
def test_ids_that_are_not_the_text_are_not_remembered(ids: list[int], text: str) -> None:
    recent = RecentTokens(byte_level_tokenizer(), 1 << 20)
    end = recent.encode("<|im_start|>a\n").end
    assert end is not None
    assert not recent.remember(end, ids, text)


def test_the_memory_is_bounded_and_can_be_off() -> None:
    tokenizer = byte_level_tokenizer()
    recent, off = RecentTokens(tokenizer, 5_000), RecentTokens(tokenizer, 0)
    for index in range(50):
        text = f"<|im_start|>{index}"
        assert list(recent.encode(text).ids) == tokenizer.encode(text) == list(off.encode(text).ids)
        assert 0 < recent.num_bytes <= 5_000
    assert recent.encode("<|im_start|>49").num_remembered
    assert not recent.encode("<|im_start|>1").num_remembered
    recent.encode("a" * 50_000)  # more than all of it: not kept, and nothing goes for it
    assert recent.encode("<|im_start|>49").num_remembered
    assert off.num_bytes == 0
    assert off.encode("<|im_start|>49").end is None


def test_half_a_surrogate_pair_is_still_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        RecentTokens(byte_level_tokenizer(), 1 << 20).encode("a\ud83d")
