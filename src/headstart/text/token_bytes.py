"""Which bytes each token id stands for. Owns the reading of a `tokenizers` decoder as rules on single tokens.

With a byte table the text of a token stream is a concatenation, so it can be decoded piece by piece, exactly, at the
cost of a dictionary lookup. It knows nothing of requests or streams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE_KEEPS_SPACE = "never"  # the prepend scheme under which no leading space is dropped

PieceToBytes = Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class PieceRules:
    """How a token's own text becomes bytes, and how many leading spaces the whole text loses (SentencePiece: 1)."""

    to_bytes: PieceToBytes
    strip_leading_spaces: int


class ByteTable(dict[int, bytes]):
    """Token id -> bytes, filled on first use. Ids without a token (a model's padding) are empty."""

    __slots__ = ("_piece_of", "_to_bytes")

    def __init__(self, tokenizer: Tokenizer, to_bytes: PieceToBytes, hidden: Mapping[int, bytes]) -> None:
        super().__init__(hidden)
        self._piece_of = tokenizer.id_to_token
        self._to_bytes = to_bytes

    def __missing__(self, token_id: int) -> bytes:
        piece = self._piece_of(token_id) if 0 <= token_id < 1 << 32 else None
        if piece is None:
            return b""
        value = self[token_id] = self._to_bytes(piece)
        return value


def piece_rules(decoder: Mapping[str, Any] | None) -> PieceRules:
    """Read a tokenizer.json `decoder` entry. Raises `ValueError` for one that does not act on tokens one by one."""
    steps = _steps(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceRules(byte_level_piece, 0)
    replace: list[tuple[str, str]] = []
    strip = 0
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"]:
            replace.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            replace.append((step["replacement"], " "))
            strip = 0 if step.get("prepend_scheme") == _METASPACE_KEEPS_SPACE else 1
        elif (
            kind == "Strip" and "Fuse" in kinds[: kinds.index("Strip")] and step["content"] == " " and not step["stop"]
        ):
            strip = int(step["start"])
        elif kind not in ("ByteFallback", "Fuse"):
            raise ValueError(f"the decoder step {kind} is not supported")
    return PieceRules(_spm_piece(tuple(replace), byte_fallback="ByteFallback" in kinds), strip)


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        raise ValueError("it has no decoder")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [inner for step in steps for inner in (_steps(step) if step["type"] == "Sequence" else [step])]


def decoder_state(tokenizer: Tokenizer) -> Mapping[str, Any] | None:
    """The decoder as tokenizer.json writes it."""
    if tokenizer.decoder is None:
        return None
    state: Mapping[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return state


def byte_level_piece(piece: str) -> bytes:
    """GPT-2's printable stand-ins to bytes; a piece with any other character (an added token) is its own UTF-8."""
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()


def _spm_piece(replace: tuple[tuple[str, str], ...], *, byte_fallback: bool) -> PieceToBytes:
    def to_bytes(piece: str) -> bytes:
        if byte_fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        for old, new in replace:
            piece = piece.replace(old, new)
        return piece.encode()

    return to_bytes


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100, U+0101, ... in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + position): byte for position, byte in enumerate(others)})
    return alphabet


_BYTE_OF: Mapping[str, int] = _byte_alphabet()
