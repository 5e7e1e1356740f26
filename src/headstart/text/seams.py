"""Where a text can be cut without changing its tokens. Owns that rule, and why it holds; tokenizes nothing itself.

The `tokenizers` library matches added tokens first, from left to right, the longest at each place, in the raw text;
what lies between is normalized, split into words and encoded piece by piece, knowing nothing of its neighbours. So the
tokens of a text are those of its parts, joined, if each part begins with a match. Four kinds of tokens are no place to
cut: those matched after normalization only; those that take the spaces before them (which the part before would keep);
those that begin with a space (which a token before may take); and none is if any token looks at the characters around.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tokenizers import AddedToken

from headstart.text.control_tokens import longest_match


class Seams:
    """Cuts texts before each of a tokenizer's control tokens."""

    def __init__(self, added: Iterable[AddedToken], control_tokens: frozenset[str]) -> None:
        """`added`: all tokens that are matched whole. Control tokens alone are cut at: answers cannot write them."""
        raw = [token for token in added if token.content and not token.normalized]
        looks_around = any(token.single_word for token in raw)
        self._match = longest_match(token.content for token in raw)
        self._seams = frozenset(
            token.content
            for token in raw
            if token.content in control_tokens and not (looks_around or token.lstrip or token.content[0].isspace())
        )

    def cut(self, text: str) -> Iterator[str]:
        """The parts of `text`, none empty: all but the first begin with a control token."""
        start = 0
        if self._seams:
            for found in self._match.finditer(text):
                if found[0] in self._seams and found.start() > start:
                    yield text[start : found.start()]
                    start = found.start()
        if start < len(text):
            yield text[start:]
