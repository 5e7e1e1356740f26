"""Token ids to text while they arrive, one `Detokenizer` a request. Owns what may leave now and what must wait.

Two things wait: bytes of a character that is not yet whole, and the longest end of the text that may still become a
stop string. Nothing else does, and the pieces joined are the text decoded at once. Knows nothing of requests or HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from headstart.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")
_LONGEST_CHARACTER = 4  # bytes of UTF-8


class Detokenizer:
    """The text of one completion: `push` token ids as they come, then `finish`. After a stop string both give ''."""

    __slots__ = (
        "_bytes",
        "_decoder",
        "_first_characters",
        "_held",
        "_include_stop",
        "_pushed_bytes",
        "_spaces_to_strip",
        "_stop",
        "stopped",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        """`prompt_token_ids` is only context: whether the text begins here (then a SentencePiece model's leading space
        is dropped), and which bytes of a character it left unfinished."""
        assert all(stop), "an empty stop string would stop everything"
        self._bytes = tokenizer.byte_table(skip_special_tokens)
        self._decoder = _UTF8("replace")
        self._stop = stop
        self._first_characters = frozenset(candidate[0] for candidate in stop)
        self._include_stop = include_stop
        self._held = ""  # a proper prefix of a stop string, not given out yet
        self._pushed_bytes = False
        self._spaces_to_strip = self._read_prompt(prompt_token_ids, tokenizer.strip_leading_spaces)
        self.stopped: str | None = None

    @property
    def spaces_to_strip(self) -> int:
        """Leading spaces that the text still loses."""
        return self._spaces_to_strip

    def push(self, token_ids: Iterable[int]) -> str:
        """The new text that may leave now."""
        if self.stopped is not None:
            return ""
        data = b"".join(map(self._bytes.__getitem__, token_ids))
        if not data:
            return ""
        self._pushed_bytes = True
        if self._spaces_to_strip:
            data = self._strip(data)
        text = self._decoder.decode(data)
        return self._until_stop(text) if self._stop else text

    def finish(self) -> str:
        """What was held. No token follows: an unfinished character is U+FFFD, the start of a stop string plain text."""
        if self.stopped is not None:
            return ""
        text = self._decoder.decode(b"", True) if self._pushed_bytes else ""
        if self._stop:
            text = self._until_stop(text)
        held, self._held = self._held, ""
        return text + held

    def _read_prompt(self, prompt: Sequence[int], strip: int) -> int:
        """Take over the prompt's unfinished character; returns how many leading spaces the completion still loses."""
        tail = b""
        for token_id in reversed(prompt):
            tail = self._bytes[token_id] + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        self._decoder.decode(tail)  # leaves the decoder inside the character, if there is one
        if not strip:
            return 0
        for token_id in prompt:
            data = self._bytes[token_id]
            spaces = len(data) - len(data.lstrip(b" "))
            if spaces < len(data) or spaces >= strip:
                return 0
            strip -= spaces
        return strip

    def _strip(self, data: bytes) -> bytes:
        while self._spaces_to_strip and data:
            if not data.startswith(b" "):
                self._spaces_to_strip = 0
                break
            data = data[1:]
            self._spaces_to_strip -= 1
        return data

    def _until_stop(self, text: str) -> str:
        """`text` goes behind what is held; gives out what cannot be part of a stop string.

        Of several stop strings the one that is complete first wins, of several complete at once the longest: so the
        result does not depend on how the text was cut into tokens.
        """
        if not self._held and self._first_characters.isdisjoint(text):  # nearly every token
            return text
        text = self._held + text
        first: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop)
            if start >= 0:
                found = (start + len(stop), start, stop)
                first = found if first is None else min(first, found)
        if first is not None:
            end, start, self.stopped = first
            self._held = ""
            return text[: end if self._include_stop else start]
        begin = min(_partial_stop(text, stop) for stop in self._stop)
        self._held = text[begin:]
        return text[:begin]


def _partial_stop(text: str, stop: str) -> int:
    """Where the longest end of `text` that is a proper prefix of `stop` begins; `len(text)` if there is none."""
    begin = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while begin >= 0:
        if stop.startswith(text[begin:]):
            return begin
        begin = text.find(stop[0], begin + 1)
    return len(text)
