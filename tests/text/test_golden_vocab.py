"""Tokenizers from GGUF metadata against llama.cpp's vectors: 46 strings a vocabulary, exact ids and exact text back."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.hub import ModelError, files_of_gguf
from headstart.text import Tokenizer
from tests.fixtures.stories import shared_data

SUPPORTED = ("deepseek-coder", "gpt-2", "llama-spm", "phi-3")
SEPARATOR = "\n__ggml_vocab_test__\n"


def vectors(name: str) -> list[tuple[str, list[int]]]:
    folder = shared_data("golden", "llama.cpp-vocab")
    texts = (folder / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode().split(SEPARATOR)
    lines = (folder / f"ggml-vocab-{name}.gguf.out").read_text(encoding="utf-8").split("\n")
    assert texts.pop() == ""
    assert lines.pop() == ""
    return [(text, [int(word) for word in line.split()]) for text, line in zip(texts, lines, strict=True)]


@pytest.fixture(scope="module", params=SUPPORTED)
def named(request: pytest.FixtureRequest) -> tuple[str, Tokenizer]:
    path = shared_data("golden", "llama.cpp-vocab", f"ggml-vocab-{request.param}.gguf")
    return request.param, Tokenizer.load(files_of_gguf(path))


def test_every_vector_is_exact(named: tuple[str, Tokenizer]) -> None:
    name, tokenizer = named
    cases = vectors(name)
    assert len(cases) == 46
    wrong = [text for text, ids in cases if tokenizer.encode(text, add_special_tokens=False) != ids]
    assert not wrong


def test_every_vector_decodes_to_its_text(named: tuple[str, Tokenizer]) -> None:
    name, tokenizer = named
    assert [tokenizer.decode(ids) for _, ids in vectors(name)] == [text for text, _ in vectors(name)]


def test_the_vocabulary_that_is_left_out_is_refused_by_type() -> None:
    path = shared_data("golden", "llama.cpp-vocab", "ggml-vocab-bert-bge.gguf")
    with pytest.raises(ModelError, match="tokenizer type 'bert' is not supported; supported: gpt2, llama"):
        Tokenizer.load(files_of_gguf(path))


def test_the_page_on_tokenizers_names_every_vocabulary_of_the_set() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "tokenizers.md").read_text(encoding="utf-8")
    names = [path.name.split(".")[0] for path in shared_data("golden", "llama.cpp-vocab").glob("*.out")]
    assert len(names) == 15
    assert not [name for name in names if f"`{name.removeprefix('ggml-vocab-')}`" not in page]
