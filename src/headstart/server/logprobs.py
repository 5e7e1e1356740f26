"""Log-probabilities of tokens in the two shapes that OpenAI's API has: the chat form and the older completions form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.core.step import TokenLogprob
from headstart.text import Tokenizer

_LOWEST = -9999.0  # JSON has no -Infinity; OpenAI sends this


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token of a text. `offset`: characters before it; `end`: those before the next token (of a character in
    pieces, the first piece has all of it). `logprob` is None for a prompt's first token."""

    token_id: int
    raw: bytes
    offset: int
    end: int
    logprob: float | None
    top: tuple[tuple[bytes, float], ...]


class EntryMaker:
    """Makes the entries of one text in order, keeping count of its characters.

    `start`: characters before the text. `leading_spaces`: those that the text lost at its beginning (SentencePiece).
    """

    def __init__(
        self, tokenizer: Tokenizer, *, start: int = 0, leading_spaces: int = 0, skip_special_tokens: bool = True
    ) -> None:
        self._bytes = tokenizer.byte_table(False)
        self._visible = tokenizer.byte_table(skip_special_tokens)
        self._offset = start
        self._leading_spaces = leading_spaces

    def token(self, token_id: int, logprob: TokenLogprob | None, num_top: int) -> TokenEntry:
        offset = self._offset
        self._advance(self._visible[token_id])
        return TokenEntry(
            token_id,
            self._bytes[token_id],
            offset,
            self._offset,
            None if logprob is None else max(logprob.logprob, _LOWEST),
            () if logprob is None else self._top(logprob, num_top),
        )

    def _advance(self, visible: bytes) -> None:
        if self._leading_spaces and visible:
            kept = visible.lstrip(b" ")
            lost = min(len(visible) - len(kept), self._leading_spaces)
            self._leading_spaces = 0 if kept else self._leading_spaces - lost
            visible = visible[lost:]
        self._offset += num_characters(visible)

    def _top(self, logprob: TokenLogprob, num_top: int) -> tuple[tuple[bytes, float], ...]:
        return tuple((self._bytes[token], max(value, _LOWEST)) for token, value in logprob.top[:num_top])


def num_characters(raw: bytes) -> int:
    """Characters that begin in `raw`, which may be a piece of UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)


def chat_logprobs(entries: Iterable[TokenEntry]) -> dict[str, Any]:
    return {
        "content": [
            {
                "token": _name(entry.raw),
                "logprob": entry.logprob,
                "bytes": list(entry.raw),
                "top_logprobs": [
                    {"token": _name(raw), "logprob": value, "bytes": list(raw)} for raw, value in entry.top
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(entries: Sequence[TokenEntry]) -> dict[str, Any]:
    """Four parallel arrays. The chosen token is always in `top_logprobs`, so there may be one more than asked for."""
    return {
        "tokens": [_name(entry.raw) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_top_by_name(entry) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _top_by_name(entry: TokenEntry) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    named: dict[str, float] = {}
    for raw, value in (*entry.top, (entry.raw, entry.logprob)):
        named.setdefault(_name(raw), value)
    return named


def _name(raw: bytes) -> str:
    """The token as text; a piece of a character as `bytes:\\xe4`, as OpenAI names it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
