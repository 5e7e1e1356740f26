"""SentencePiece-BPE as a `tokenizers` object, from pieces and scores (GGUF metadata, or a SentencePiece model's list).

Owns: which merges a scored vocabulary implies. It must not know files.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

SPACE = "\u2581"  # SentencePiece's visible space


class TokenType(IntEnum):
    """A token's kind, with GGUF's (and SentencePiece's) numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_spm_bpe(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    add_space_prefix: bool = True,
) -> Tokenizer:
    """A tokenizer that segments as SentencePiece does: best-scored merge first, unknown characters as bytes.

    `pieces`, `scores` and `types` run parallel to the token ids. Control and unknown pieces become special tokens,
    user-defined ones plain added tokens. Raises `ValueError` where the lists differ in length.
    """
    if not len(pieces) == len(scores) == len(types):
        raise ValueError(f"{len(pieces)} tokens, {len(scores)} scores and {len(types)} token types do not match")
    vocab = {piece: index for index, piece in enumerate(pieces)}
    unknown = next((piece for piece, kind in zip(pieces, types, strict=True) if kind == TokenType.UNKNOWN), None)
    model = BPE(
        vocab=vocab,
        merges=_merges(pieces, scores, types),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in types,
        ignore_merges=False,
    )
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), replace] if add_space_prefix else [replace]
    )
    decode_steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        decode_steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decode_steps)
    add_tokens_by_type(tokenizer, pieces, types)
    return tokenizer


def add_tokens_by_type(tokenizer: Tokenizer, pieces: Sequence[str], types: Sequence[int]) -> None:
    """Tell the tokenizer which of its tokens are matched whole: control ones (special), user-defined ones."""
    special = [p for p, kind in zip(pieces, types, strict=True) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
    # A piece of visible spaces never occurs in a text as it stands; merges reach it.
    plain = [p for p, kind in zip(pieces, types, strict=True) if kind == TokenType.USER_DEFINED and SPACE not in p]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in plain])


def _merges(pieces: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every pair of pieces whose concatenation is a piece, the best-scored result first.

    Ties go to the lower id of the result, then to the lower ids of the parts, as Hugging Face's converters order them.
    """
    mergeable = {
        piece: index
        for index, (piece, kind) in enumerate(zip(pieces, types, strict=True))
        if kind in (TokenType.NORMAL, TokenType.USER_DEFINED)
    }
    ranked = []
    for piece, index in mergeable.items():
        for cut in range(1, len(piece)):
            left = mergeable.get(piece[:cut])
            if left is not None:
                right = mergeable.get(piece[cut:])
                if right is not None:
                    ranked.append((-scores[index], index, left, right))
    ranked.sort()
    return [(pieces[left], pieces[right]) for _, _, left, right in ranked]
