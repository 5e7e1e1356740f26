"""The incremental detokenizer against a slow oracle: any token ids, any split, any stop strings, any prompt."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.text import Detokenizer, Tokenizer
from tests.fixtures.tiny_vocab import byte_level_tokenizer, spm_tokenizer

TOKENIZERS = {"byte-level": byte_level_tokenizer, "sentencepiece": spm_tokenizer}

kinds = st.sampled_from(sorted(TOKENIZERS))
# Ids beyond the vocabulary stand for a model whose embedding is padded.
ids = st.integers(0, 280)
text_ids = st.text(alphabet="abhel o你é🙂<", max_size=8)
stops = st.lists(st.text(alphabet="ab hel你\ufffd", min_size=1, max_size=4), max_size=3).map(tuple)


@st.composite
def completions(draw: st.DrawFn, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids in the batches in which they arrive: words, characters byte by byte, and garbage."""
    pieces = st.one_of(
        st.lists(ids, max_size=4),
        text_ids.map(lambda text: tokenizer.encode(text, add_special_tokens=False)),
        text_ids.map(lambda text: bytes_as_ids(tokenizer, text.encode())),
    )
    flat = [token_id for piece in draw(st.lists(pieces, max_size=6)) for token_id in piece]
    cuts = sorted(draw(st.lists(st.integers(0, len(flat)), max_size=len(flat))))
    return [flat[start:end] for start, end in zip([0, *cuts], [*cuts, len(flat)], strict=True)]


# Enough to complete any beginning of a character: the range of the second byte depends on the first.
CONTINUATIONS = [bytes([second] + [0x80] * more) for second in (0x80, 0x90, 0xA0) for more in range(3)]


def bytes_as_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    (first,) = tokenizer.encode("\0", add_special_tokens=False)[-1:]
    return [byte + first for byte in data]


def streamed(detokenizer: Detokenizer, batches: Sequence[Sequence[int]]) -> str:
    return "".join([*(detokenizer.push(batch) for batch in batches), detokenizer.finish()])


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[int, int, str] | None:
    """(end, start, stop string) of the stop that is complete first, the longest of several, by looking at every end."""
    for end in range(1, len(text) + 1):
        complete = [candidate for candidate in stop if text.endswith(candidate, 0, end)]
        if complete:
            longest = max(complete, key=len)
            return end, end - len(longest), longest
    return None


@settings(deadline=None)
@given(st.data(), kinds, st.booleans())
def test_joined_deltas_are_the_full_decode(data: st.DataObject, kind: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[kind]()
    batches = data.draw(completions(tokenizer))
    flat = [token_id for batch in batches for token_id in batch]
    assert streamed(Detokenizer(tokenizer, (), (), skip), batches) == tokenizer.decode(flat, skip)


@settings(deadline=None)
@given(st.data(), kinds, st.booleans())
def test_a_completion_continues_its_prompt(data: st.DataObject, kind: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[kind]()
    prompt = tokenizer.encode(data.draw(text_ids))
    batches = data.draw(completions(tokenizer))
    flat = [token_id for batch in batches for token_id in batch]
    whole = tokenizer.decode([*prompt, *flat], skip)
    text = streamed(Detokenizer(tokenizer, prompt, (), skip), batches)
    assert tokenizer.decode(prompt, skip) + text == whole


@settings(deadline=None)
@given(st.data(), kinds, stops, st.booleans())
def test_stop_strings_end_the_text_where_the_oracle_says(
    data: st.DataObject, kind: str, stop: tuple[str, ...], include: bool
) -> None:
    tokenizer = TOKENIZERS[kind]()
    batches = data.draw(completions(tokenizer))
    whole = tokenizer.decode([token_id for batch in batches for token_id in batch])
    detokenizer = Detokenizer(tokenizer, (), stop, include_stop=include)
    text = streamed(detokenizer, batches)
    found = first_stop(whole, stop)
    if found is None:
        assert (text, detokenizer.stopped) == (whole, None)
    else:
        end, start, expected = found
        assert (text, detokenizer.stopped) == (whole[: end if include else start], expected)
        assert detokenizer.push([100]) == ""
        assert detokenizer.finish() == ""


@settings(deadline=None)
@given(st.data(), kinds, stops)
def test_nothing_is_held_longer_than_it_must(data: st.DataObject, kind: str, stop: tuple[str, ...]) -> None:
    tokenizer = TOKENIZERS[kind]()
    detokenizer = Detokenizer(tokenizer, (), stop)
    seen: list[int] = []
    given_out = ""
    for batch in data.draw(completions(tokenizer)):
        seen += batch
        given_out += detokenizer.push(batch)
        if detokenizer.stopped is not None:
            return
        known = whole_characters(tokenizer, seen)
        held = known.removeprefix(given_out)
        assert given_out + held == known
        longest = max((size for s in stop for size in range(1, len(s)) if known.endswith(s[:size])), default=0)
        assert len(held) == longest


def whole_characters(tokenizer: Tokenizer, seen: list[int]) -> str:
    """The text of `seen` without the character that it may have left unfinished."""
    data = b"".join(tokenizer.byte_table(True)[token_id] for token_id in seen)
    for _ in range(tokenizer.strip_leading_spaces):
        data = data.removeprefix(b" ")
    for size in (3, 2, 1):  # an unfinished end is one that some continuation makes a single character
        end = data[len(data) - size :] if size <= len(data) else b""
        if end and any(is_one_character(end + rest) for rest in CONTINUATIONS):
            return data[: len(data) - size].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


def is_one_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False
