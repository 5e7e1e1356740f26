"""Texts that were tokenized lately, with their tokens, and answers with the tokens that were sampled for them.

Owns what is remembered, under which name, and what is forgotten first. A prompt is looked up piece by piece (see
`seams`): by the piece's own text, which gives what tokenizing it would; or, where an answer was made, by all the text
up to its end, which gives the sampled ids, for those are what the prefix cache knows. Nothing is shared between salts.
Texts are kept as digests only. Safe to use from several threads. Knows nothing of requests or HTTP.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

from headstart.text.control_tokens import Piece
from headstart.text.tokenizer import Tokenizer

_ENTRY_BYTES = 400  # of an entry without its ids: key, array, links
_ID_BYTES = 4
_ID_TYPE = "I"
_Ids: TypeAlias = "array[int]"


@dataclass(frozen=True, slots=True)
class Open:
    """The end of a prompt, where its answer goes on: what the answer will be remembered by."""

    salt: bytes
    before: bytes  # stands for all that comes before the last piece
    last: Piece
    ids: _Ids  # of the last piece


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's ids. `num_remembered` of them were not tokenized, `num_sampled` of these are of an answer."""

    ids: tuple[int, ...]
    num_remembered: int = 0
    num_sampled: int = 0
    end: Open | None = None  # None: answers to it are not remembered


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a text. `known` runs parallel to `pieces`, None where a piece must be tokenized."""

    pieces: Sequence[Piece]
    keys: Sequence[bytes]
    known: Sequence[_Ids | None]
    num_sampled: int
    salt: bytes
    before_last: bytes

    @property
    def num_known(self) -> int:
        """Tokens."""
        return sum(len(ids) for ids in self.known if ids is not None)

    def unknown(self) -> list[Piece]:
        return [piece for piece, ids in zip(self.pieces, self.known, strict=True) if ids is None]


class RecentTokens:
    """The memory of one tokenizer, of at most `max_bytes`; what was not used for longest goes first. 0 turns it off."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Ids] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def encode(self, text: str, add_special_tokens: bool = True, salt: str = "") -> Prompt:
        """As `Tokenizer.encode`, but for the ids of answers that were sampled otherwise."""
        return self.complete(self.find(text, salt), add_special_tokens)

    def find(self, text: str, salt: str = "") -> Found:
        """What is remembered of `text`."""
        pieces = self._tokenizer.pieces(text)
        key_of_salt = _digest(salt.encode("utf-8", "surrogatepass"))
        if not self._max_bytes:
            return Found(pieces, (), [None] * len(pieces), 0, key_of_salt, b"")
        keys = [_key(piece, key_of_salt) for piece in pieces]
        chain, chains = key_of_salt, []
        for key in keys:
            chain = _digest(chain, key)
            chains.append(chain)
        known: list[_Ids | None] = []
        num_sampled = 0
        with self._lock:
            for key, chain in zip(keys, chains, strict=True):
                ids = self._get(chain)
                num_sampled += 0 if ids is None else len(ids)
                known.append(self._get(key) if ids is None else ids)
        return Found(pieces, keys, known, num_sampled, key_of_salt, chains[-2] if len(chains) > 1 else key_of_salt)

    def complete(self, found: Found, add_special_tokens: bool) -> Prompt:
        """Tokenize what is not known and remember it. Raises `ValueError` as `Tokenizer.encode` does."""
        missing = found.unknown()
        fresh = [array(_ID_TYPE, ids) for ids in self._tokenizer.encode_pieces(missing)]
        sources = iter(fresh)
        parts = [next(sources) if ids is None else ids for ids in found.known]
        ids = tuple(self._tokenizer.joined(parts, add_special_tokens))
        if not found.keys:
            return Prompt(ids)
        with self._lock:
            for key, known, part in zip(found.keys, found.known, parts, strict=True):
                if known is None:
                    self._put(key, part)
        open_end = not (add_special_tokens and self._tokenizer.marks[1])
        end = Open(found.salt, found.before_last, found.pieces[-1], parts[-1]) if open_end else None
        return Prompt(ids, found.num_known, found.num_sampled, end)

    def remember(self, end: Open, answer_ids: Sequence[int], answer: str) -> bool:
        """The next prompt that holds `answer` here gets `answer_ids` there; unless they spell it otherwise."""
        ids = self._spelling(answer_ids, answer.encode("utf-8", "surrogatepass"))
        if not ids:
            return False
        whole = Piece(end.last.text + answer, end.last.continues)
        with self._lock:
            self._put(_digest(end.before, _key(whole, end.salt)), end.ids + array(_ID_TYPE, ids))
        return True

    def _spelling(self, ids: Sequence[int], text: bytes) -> Sequence[int]:
        """The first of `ids` (those after a stop string go), if they are exactly `text`; else nothing."""
        table = self._tokenizer.byte_table(skip_special_tokens=False)
        data = [table[token_id] for token_id in ids]
        size = sum(map(len, data))
        while data and size > len(text):
            size -= len(data.pop())
        return ids[: len(data)] if b"".join(data) == text else ()

    def _get(self, key: bytes) -> _Ids | None:
        ids = self._entries.get(key)
        if ids is not None:
            self._entries.move_to_end(key)
        return ids

    def _put(self, key: bytes, ids: _Ids) -> None:
        self._forget(key)
        if _weight(ids) > self._max_bytes:
            return
        self._entries[key] = ids
        self.num_bytes += _weight(ids)
        while self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._entries)))

    def _forget(self, key: bytes) -> None:
        ids = self._entries.pop(key, None)
        if ids is not None:
            self.num_bytes -= _weight(ids)


def _weight(ids: _Ids) -> int:
    return _ENTRY_BYTES + _ID_BYTES * len(ids)


def _key(piece: Piece, salt: bytes) -> bytes:
    """Of a piece alone. A half surrogate is no text for a tokenizer, but has a key."""
    kind = b"goes on" if piece.continues else b"begins"
    return blake2b(piece.text.encode("utf-8", "surrogatepass"), digest_size=32, key=salt, person=kind).digest()


def _digest(*parts: bytes) -> bytes:
    """Each part but the last must be of one length."""
    return blake2b(b"".join(parts), digest_size=32).digest()
