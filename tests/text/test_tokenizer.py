"""Tokenizers of folders and GGUF files: special ids, added tokens, exact bytes, and what a bad one is told."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders
from tokenizers.models import BPE

from headstart.hub import ModelError, files_of_folder, resolve
from headstart.text import Tokenizer
from headstart.text.byte_bpe import PRE_RULES
from headstart.text.gguf_vocab import Vocabulary
from tests.fixtures.stories import make_stories_folder, shared_data, stories_tokenizer
from tests.fixtures.tiny_vocab import (
    byte_level_metadata,
    byte_level_tokenizer,
    load_vocabulary,
    spm_metadata,
    spm_tokenizer,
)


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(files_of_folder(make_stories_folder(tmp_path_factory.mktemp("stories"))))


def test_a_folder_with_tokenizer_json(stories: Tokenizer) -> None:
    assert (stories.vocab_size, stories.bos_token_id, stories.eos_token_ids) == (512, 1, (2,))
    text = "Once upon a time, 你好 🙂\n  x"
    assert stories.encode(text)[0] == 1
    assert stories.encode(text, add_special_tokens=False)[0] != 1
    assert stories.decode(stories.encode(text)) == text
    assert stories.encode("") == [1]
    assert stories.encode("", add_special_tokens=False) == []


def test_the_story_model_reads_its_own_golden_text(stories: Tokenizer) -> None:
    golden = json.loads(shared_data("models", "stories260K-hf", "golden_greedy.json").read_text(encoding="utf-8"))
    text = stories.decode(golden["greedy_ids"])
    assert text.startswith("Once upon a time, there was a little girl named Lily.")
    assert stories.encode(text) == [*golden["prompt_ids"], *golden["greedy_ids"]]


@pytest.mark.parametrize("skip", [True, False])
def test_decode_is_the_librarys_for_every_kind_of_ids(stories: Tokenizer, skip: bool) -> None:
    library = stories_tokenizer()
    chance = random.Random(0)
    for _ in range(200):
        ids = [0, 1, 2, *[chance.randrange(259, 512) for _ in range(chance.randrange(20))]]
        chance.shuffle(ids)
        assert stories.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("skip", [True, False])
def test_byte_level_decode_is_the_librarys_bytes_and_all(skip: bool) -> None:
    tokenizer = byte_level_tokenizer()
    library = tokenizer._tokenizer
    chance = random.Random(1)
    for _ in range(500):
        ids = [chance.randrange(tokenizer.vocab_size) for _ in range(chance.randrange(12))]
        assert tokenizer.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


def test_token_bytes_are_exact_and_text_is_what_can_be_shown() -> None:
    tokenizer = byte_level_tokenizer()
    exact = tokenizer.byte_table(skip_special_tokens=False)
    assert [exact[token_id] for token_id in range(256)] == [bytes([byte]) for byte in range(256)]
    assert tokenizer.token_text(0xE4) == "\ufffd"
    assert tokenizer.token_text(tokenizer.eos_token_ids[0]) == "<|im_end|>"
    assert exact[99_999] == b""
    spm = spm_tokenizer()
    assert spm.byte_table(False)[3 + 0xE4] == b"\xe4"
    assert spm.token_text(spm.encode("ab")[1]) == " ab"


@pytest.mark.parametrize("make", [byte_level_tokenizer, spm_tokenizer])
def test_any_text_comes_back(make: Any) -> None:
    tokenizer = make()
    for text in ("", " ", "  a  ", "hello ab\n\t", "你好é🙂", "\0\x7f", "a" * 5000, "▁"):
        expected = (
            text.replace("▁", " ") if make is spm_tokenizer else text
        )  # SentencePiece itself cannot tell them apart
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == expected


def test_half_a_surrogate_pair_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 1"):
        byte_level_tokenizer().encode("a\ud83d")


def test_control_tokens_in_a_text_are_recognised() -> None:
    tokenizer = byte_level_tokenizer()
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_ids[0]
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>", add_special_tokens=False)
    assert (ids[0], ids[-1], len(ids)) == (start, end, 3)


def test_encoding_leaves_the_other_threads_running() -> None:
    tokenizer = byte_level_tokenizer()
    text = "hello a你" * 50_000
    counted, done = [0], threading.Event()

    def encode() -> None:
        tokenizer.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.is_set():
        counted[0] += 1
    thread.join()
    assert counted[0] > 1000  # a held GIL would have let this loop run a handful of times


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"tokenizer.ggml.add_bos_token": True}, ["bos"]),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, ["bos", "eos"]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, ["bos"]),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, []),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path, change: dict[str, Any], expected: list[str]) -> None:
    tokenizer = load_vocabulary(byte_level_metadata() | change, tmp_path / "m.gguf")
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_ids[0]}
    assert tokenizer.encode("") == [ids[name] for name in expected]
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_every_token_that_ends_a_turn_is_an_end(tmp_path: Path) -> None:
    tokenizer = load_vocabulary(byte_level_metadata(), tmp_path / "m.gguf")
    assert [tokenizer.token_text(index) for index in tokenizer.eos_token_ids] == ["<|im_end|>", "<|endoftext|>"]


def test_sentencepiece_without_a_space_prefix(tmp_path: Path) -> None:
    metadata = spm_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = load_vocabulary(metadata, tmp_path / "m.gguf")
    assert [tokenizer.token_text(index) for index in tokenizer.encode("ab ab")] == ["<s>", "ab", " ab"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


@pytest.mark.parametrize("name", sorted(PRE_RULES))
def test_every_named_pre_tokenizer_loses_no_text(tmp_path: Path, name: str) -> None:
    tokenizer = load_vocabulary(byte_level_metadata(name), tmp_path / "m.gguf")
    for text in ("I'm 12345 times\r\n\n  it's   fine!!", "你好，世界 été\t🙂 x_y", " \n "):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "I'll pay 1234 now", ["I", "'ll", " pay", " 1234", " now"]),
        ("llama-bpe", "I'LL pay 1234\n\n!", ["I", "'LL", " pay", " ", "123", "4", "\n\n", "!"]),
        ("qwen2", "I'LL pay 12", ["I", "'LL", " pay", " ", "1", "2"]),
        ("smollm", "pay 12 now", ["pay", " ", "1", "2", " now"]),
        ("falcon", "a 1234!", ["a", " ", "123", "4", "!"]),
        ("deepseek-coder", "pay 12\n你好", ["pay", " ", "1", "2", "\n", "你好"]),
    ],
)
def test_words_are_cut_as_the_models_tokenizers_cut_them(name: str, text: str, words: list[str]) -> None:
    rule = PRE_RULES[name].split()
    assert [text[start:end] for _, (start, end) in rule.pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer type 'bert' is not supported"),
        ({"tokenizer.ggml.model": None}, "lacks tokenizer.ggml.model"),
        ({"tokenizer.ggml.pre": None}, "does not say how it splits words"),
        ({"tokenizer.ggml.pre": "gpt2"}, "pre-tokenizer 'gpt2' is not supported .*nearest is 'gpt-2'"),
        ({"tokenizer.ggml.tokens": None}, "lacks tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokens does not hold strings"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "damaged vocabulary"),
        ({"tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["h zz"]}, "merge 'h zz' does not join two tokens"),
        ({"tokenizer.ggml.merges": ["h h"]}, "damaged vocabulary"),
        ({"tokenizer.ggml.merges": ["hh"]}, "merge 'hh' does not join two tokens"),
        ({"tokenizer.ggml.bos_token_id": 5000}, "bos_token_id is 5000, outside the vocabulary of 267"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id is str, expected int"),
    ],
)
def test_a_bad_vocabulary_is_one_clear_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        load_vocabulary(byte_level_metadata() | change, tmp_path / "m.gguf")
    assert "\n" not in str(error.value)


def test_user_defined_spaces_are_reached_by_merges(tmp_path: Path) -> None:
    metadata = spm_metadata()
    spaces = metadata["tokenizer.ggml.tokens"].index("▁▁")
    metadata["tokenizer.ggml.token_type"][spaces] = 4
    tokenizer = load_vocabulary(metadata | {"tokenizer.ggml.add_space_prefix": False}, tmp_path / "m.gguf")
    assert tokenizer.encode("a  b", add_special_tokens=False)[1] == spaces
    assert tokenizer.decode(tokenizer.encode("a  b")) == "a  b"


def test_a_scored_vocabulary_must_have_all_scores(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="2 scores and 271 token types do not match"):
        load_vocabulary(spm_metadata() | {"tokenizer.ggml.scores": [0.5, 0.5]}, tmp_path / "m.gguf")


def folder_with(tmp_path: Path, **texts: object) -> Path:
    """A folder with config.json, empty weights and, by keyword, further JSON files (`__` is a dot)."""
    for name, value in {"config__json": {}, "model__safetensors": "", **texts}.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (tmp_path / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return tmp_path


def test_a_folder_without_a_usable_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    with pytest.raises(ModelError, match=r"lacks tokenizer\.json"):
        Tokenizer.load(files_of_folder(folder))
    with pytest.raises(ModelError, match=r"only a SentencePiece tokenizer\.model: write tokenizer\.json with"):
        Tokenizer.load(files_of_folder(folder_with(tmp_path, tokenizer__model="")))
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged or of an unknown kind"):
        Tokenizer.load(files_of_folder(folder_with(tmp_path, tokenizer__json="{")))


def test_a_decoder_that_cannot_be_streamed_is_refused() -> None:
    library = Library(BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(ModelError, match="mine cannot be used: it has no decoder"):
        Tokenizer(Vocabulary(library, None, ()), source="mine")
    library.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="the decoder step WordPiece is not supported"):
        Tokenizer(Vocabulary(library, None, ()), source="mine")


def test_special_ids_come_from_every_file_that_names_them(tmp_path: Path) -> None:
    stories_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None}
    files = files_of_folder(
        folder_with(
            tmp_path,
            config__json={"bos_token_id": 7, "eos_token_id": 8},
            tokenizer_config__json=config,
            generation_config__json={"eos_token_id": [2, 300, 301]},
        )
    )
    tokenizer = Tokenizer.load(files)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2, 300, 301))
    bare = Tokenizer.load(replace(files, tokenizer_config=None, generation_config=None))
    assert (bare.bos_token_id, bare.eos_token_ids) == (7, (8,))


def test_a_tokenizer_json_that_truncates_or_pads_does_neither_here(tmp_path: Path) -> None:
    library = stories_tokenizer()
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(files_of_folder(folder_with(tmp_path)))
    assert 10 < len(tokenizer.encode("Once upon a time, there was a little girl")) < 64


@pytest.mark.model
def test_the_default_models_tokenizer() -> None:
    tokenizer = Tokenizer.load(resolve("smollm2-135m"))
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (49_152, 1, (2, 0))
    text = "<|im_start|>user\nHello, 你好 🙂 1234<|im_end|>\n"
    ids = tokenizer.encode(text)
    assert (ids[0], ids[-2]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
