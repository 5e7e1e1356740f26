"""A `tokenizers` object from GGUF metadata: byte-level BPE (`gpt2`) and SentencePiece-BPE (`llama`).

Owns the meaning of the `tokenizer.ggml.*` keys. Knows nothing of Hugging Face's files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from headstart.hub import GGUFFile, ModelError
from headstart.text.byte_bpe import PRE_RULES, PreRule, build_byte_bpe
from headstart.text.spm import TokenType, build_spm_bpe

# Tokens that end a turn where a file's eos_token_id names only one of a model's several (as llama.cpp counts them).
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer and its special ids."""

    tokenizer: Tokenizer
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # the file's own first


def vocabulary_of_gguf(file: GGUFFile) -> Vocabulary:
    """Build the tokenizer that the file describes. Raises `ModelError` for an unsupported or damaged vocabulary."""
    kind = file.require("tokenizer.ggml.model", str)
    tokens = _strings(file, "tokenizer.ggml.tokens")
    types = _integers(file, "tokenizer.ggml.token_type", len(tokens))
    try:
        if kind == "gpt2":
            rule = _pre_rule(file)
            tokenizer = build_byte_bpe(rule, tokens, types, _strings(file, "tokenizer.ggml.merges"))
            adds_bos = rule.adds_bos
        elif kind == "llama":
            prefix = file.get("tokenizer.ggml.add_space_prefix", bool)
            scores = _numbers(file, "tokenizer.ggml.scores")
            tokenizer = build_spm_bpe(tokens, scores, types, add_space_prefix=prefix is not False)
            adds_bos = True
        else:
            raise ModelError(f"{file.path}: tokenizer type {kind!r} is not supported; supported: gpt2, llama")
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{file.path}: damaged vocabulary: {error}; download it again") from None
    bos = _token_id(file, "bos", len(tokens))
    eos = _token_id(file, "eos", len(tokens))
    added_bos = bos if _flag(file, "bos", adds_bos) else None
    added_eos = eos if _flag(file, "eos", False) else None
    _add_bos_and_eos(tokenizer, tokens, added_bos, added_eos)
    return Vocabulary(tokenizer, bos, _end_ids(file, tokens, types, eos))


def _pre_rule(file: GGUFFile) -> PreRule:
    name = file.get("tokenizer.ggml.pre", str)
    if name is None:
        raise ModelError(f"{file.path} does not say how it splits words (tokenizer.ggml.pre): use a newer conversion")
    rule = PRE_RULES.get(name)
    if rule is None:
        near = get_close_matches(name, PRE_RULES, n=1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise ModelError(f"{file.path}: pre-tokenizer {name!r} is not supported (known: {', '.join(PRE_RULES)}{hint})")
    return rule


def _add_bos_and_eos(tokenizer: Tokenizer, tokens: list[str], bos: int | None, eos: int | None) -> None:
    if bos is None and eos is None:
        return
    before, after = ([] if bos is None else [tokens[bos]]), ([] if eos is None else [tokens[eos]])
    ids = [(tokens[index], index) for index in {bos, eos} if index is not None]
    tokenizer.post_processor = TemplateProcessing(
        single=[*before, "$A", *after], pair=[*before, "$A", *after, *before, "$B", *after], special_tokens=ids
    )


def _flag(file: GGUFFile, which: str, default: bool) -> bool:
    value = file.get(f"tokenizer.ggml.add_{which}_token", bool)
    return default if value is None else value


def _token_id(file: GGUFFile, which: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{which}_token_id"
    value = file.get(key, int)
    if value is not None and not 0 <= value < vocab_size:
        raise ModelError(f"{file.path}: {key} is {value}, outside the vocabulary of {vocab_size}")
    return value


def _end_ids(file: GGUFFile, tokens: list[str], types: list[int], eos: int | None) -> tuple[int, ...]:
    """EOS, the file's end-of-turn id, and control tokens that are known to end a turn."""
    found = [eos, _token_id(file, "eot", len(tokens))]
    controls = {token: index for index, token in enumerate(tokens) if types[index] == TokenType.CONTROL}
    found += [controls.get(text) for text in _END_OF_TURN]
    return tuple(dict.fromkeys(index for index in found if index is not None))


def _strings(file: GGUFFile, key: str) -> list[str]:
    return _elements(file, key, lambda value: isinstance(value, str), "strings")


def _numbers(file: GGUFFile, key: str) -> list[float]:
    return _elements(file, key, lambda value: isinstance(value, float), "floats")


def _integers(file: GGUFFile, key: str, default_count: int) -> list[int]:
    if key not in file.metadata:
        return [int(TokenType.NORMAL)] * default_count
    return _elements(file, key, lambda value: isinstance(value, int), "integers")


def _elements(file: GGUFFile, key: str, is_kind: Callable[[object], bool], plural: str) -> list[Any]:
    values: list[Any] = file.require(key, list)
    if values and not is_kind(values[0]):  # GGUF arrays are homogeneous
        raise ModelError(f"{file.path}: {key} does not hold {plural}")
    return values
