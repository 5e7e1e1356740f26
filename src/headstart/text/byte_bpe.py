"""Byte-level BPE as a `tokenizers` object, from GGUF metadata.

GGUF names a model's pre-tokenizer (`tokenizer.ggml.pre`) where Hugging Face's tokenizer.json spells it out; this module
owns what each name stands for: the rules are those of the models' own tokenizer.json. It must not know files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from headstart.text.spm import add_tokens_by_type

# Llama 3's words; `{digits}` is how many digits a number token spans at most.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Qwen 3.5's: Qwen 2's, with combining marks counted to the letters.
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = "[一-龥ࠀ-一가-\ud7ff]+"  # as DeepSeek's first tokenizers have it


@dataclass(frozen=True, slots=True)
class PreRule:
    """What one `tokenizer.ggml.pre` name stands for."""

    split: Callable[[], PreTokenizer]
    ignore_merges: bool = False  # a word that is itself a token is taken whole
    adds_bos: bool = False  # where the file does not say
    nfc: bool = False  # text is brought into Unicode's composed form first


def _isolated(pattern: str) -> PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _to_bytes(*, words: bool) -> PreTokenizer:
    """Bytes to printable characters; with `words`, split by GPT-2's rule before."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)


def _gpt2() -> PreTokenizer:
    return _to_bytes(words=True)


def _single_digits() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _to_bytes(words=True)])


def _llama3(digits: str) -> Callable[[], PreTokenizer]:
    return lambda: pre_tokenizers.Sequence([_isolated(_LLAMA3.format(digits=digits)), _to_bytes(words=False)])


def _qwen35() -> PreTokenizer:
    return pre_tokenizers.Sequence([_isolated(_QWEN35), _to_bytes(words=False)])


def _deepseek_coder() -> PreTokenizer:
    rules = [_isolated("[\r\n]"), _isolated(r"\s?\p{L}+"), _isolated(r"\s?\p{P}+"), _isolated(_CJK)]
    return pre_tokenizers.Sequence([*rules, pre_tokenizers.Digits(individual_digits=True), _to_bytes(words=False)])


def _falcon() -> PreTokenizer:
    rules = [pre_tokenizers.Punctuation(behavior="contiguous"), _to_bytes(words=True)]
    return pre_tokenizers.Sequence([*rules, pre_tokenizers.Digits(individual_digits=False), _isolated("[0-9]{3}")])


PRE_RULES: dict[str, PreRule] = {
    "gpt-2": PreRule(_gpt2),
    "phi-2": PreRule(_gpt2),
    "olmo": PreRule(_gpt2, nfc=True),
    "mpt": PreRule(_gpt2, nfc=True),
    "llama-bpe": PreRule(_llama3("{1,3}"), ignore_merges=True, adds_bos=True),
    "smaug-bpe": PreRule(_llama3("{1,3}")),
    "dbrx": PreRule(_llama3("{1,3}")),
    "qwen2": PreRule(_llama3(""), nfc=True),
    "deepseek-r1-qwen": PreRule(_llama3(""), nfc=True),
    "stablelm2": PreRule(_llama3("")),
    "qwen35": PreRule(_qwen35, nfc=True),
    "starcoder": PreRule(_single_digits),
    "refact": PreRule(_single_digits),
    "smollm": PreRule(_single_digits),
    "command-r": PreRule(_single_digits, nfc=True),
    "deepseek-coder": PreRule(_deepseek_coder),
    "falcon": PreRule(_falcon),
}


def build_byte_bpe(rule: PreRule, tokens: Sequence[str], types: Sequence[int], merges: Sequence[str]) -> Tokenizer:
    """A byte-level BPE tokenizer. `tokens` and `types` run parallel to the ids; `merges` are "left right", best first.

    Raises `ValueError` for a malformed merge or one whose parts are no tokens.
    """
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab:
            raise ValueError(f"merge {merge!r} does not join two tokens")
        pairs.append((left, right))
    try:
        model = BPE(vocab=vocab, merges=pairs, ignore_merges=rule.ignore_merges)
    except Exception as error:  # the library raises a bare Exception, e.g. for a merge into no token
        raise ValueError(str(error)) from None
    tokenizer = Tokenizer(model)
    if rule.nfc:
        tokenizer.normalizer = _nfc()
    tokenizer.pre_tokenizer = rule.split()
    tokenizer.decoder = decoders.ByteLevel()
    add_tokens_by_type(tokenizer, tokens, types)
    return tokenizer


def _nfc() -> Normalizer:
    return normalizers.NFC()
