"""Control tokens in callers' text. Owns the rule that only a chat template, never what it prints, can write one.

`<|im_end|>` typed by a user is ten characters of text; from the template it is the end of a turn. Both look alike in a
rendered prompt. So before rendering, one character of each such place in callers' strings is changed for a stand-in of
the same length; afterwards it is changed back, and where it lies inside a control token the prompt is cut, so that
nothing is matched across the cut. Texts without such places, nearly all, pass unchanged. Knows no tokenizer.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_STAND_INS = range(0xA000, 0xA48D)  # Yi syllables: printable, without case, never stripped, one code unit in JSON

# What is still to come at each character; "" marks the end of a token.
_Trie = dict[str, "_Trie"]


class Piece(NamedTuple):
    """A part of a prompt that is encoded apart. `continues`: it goes on in the middle of a text."""

    text: str
    continues: bool


class PromptText(str):
    """A prompt in which some control tokens are only text: encode the `pieces` one by one, and join the ids."""

    __slots__ = ("pieces",)

    pieces: tuple[Piece, ...]


class ControlTokens:
    """The texts of a model's control tokens, and where callers' strings hold them or could help to make one up."""

    def __init__(self, texts: Iterable[str]) -> None:
        """A token of one character cannot be told apart from that character and is left alone."""
        tokens = sorted({text for text in texts if len(text) > 1})
        firsts = [f"{re.escape(first)}(?=({_pattern(rest)}))" for first, rest in _trie(tokens).items()]
        self._token = re.compile("|".join(firsts) or "(?!)", re.DOTALL)  # takes the first character, looks at the rest
        self._longest = max(map(len, tokens), default=0)
        self._inner = "\0".join(tokens)
        self._beginnings = frozenset(text[:cut] for text in tokens for cut in range(1, len(text)))
        self._endings = frozenset(text[cut:] for text in tokens for cut in range(1, len(text)))
        # A string without any of these is taken as it is: no template leaves a token open for a bare word.
        self._marks = tuple({character for text in tokens for character in text if _tells(character)})
        self._only_words = any(not _tells(text) for text in tokens)

    def protect(self, values: dict[str, Any], template: str) -> tuple[dict[str, Any], Protection | None]:
        """`values` (JSON-like) with stand-ins in its strings and keys; None where there is nothing to protect from.

        `template`: the source of what will print them; no stand-in is taken from its characters.
        """
        strings: list[str] = []
        _collect(values, strings)
        if not self._is_suspect("\n".join(strings)):  # nearly always
            return values, None
        found = {text: places for text in strings if self._is_suspect(text) and (places := self._places(text))}
        if not found:
            return values, None
        characters = {text[place] for text, places in found.items() for place in places}
        stand_ins = _unused(sorted(characters), "\n".join([template, *strings]).lower())
        changed = {}
        for text, places in found.items():
            letters = list(text)
            for place in places:
                letters[place] = stand_ins[letters[place]]
            changed[text] = "".join(letters)
        return _exchanged(values, changed), Protection(self, {new: old for old, new in stand_ins.items()})

    def matches(self, text: str) -> list[tuple[int, int]]:
        """Where control tokens stand in `text`: (start, end), the longest at each start, overlapping ones too."""
        return [(found.start(), found.end(found.lastindex or 0)) for found in self._token.finditer(text)]

    def count(self, text: str) -> int:
        """How many control tokens stand in `text`."""
        return sum(1 for _ in self._token.finditer(text))

    def _is_suspect(self, text: str) -> bool:
        return any(map(text.__contains__, self._marks)) or self._only_words

    def _places(self, text: str) -> list[int]:
        """The characters to change: the first of each control token, and of a part of one where it touches a border."""
        places = {found.start() for found in self._token.finditer(text)}
        first, last = len(text) - len(text.lstrip()), len(text.rstrip())
        for end in range(first + 1, min(last, first + self._longest) + 1):
            if text[first:end] in self._endings and _tells(text[first:end]):
                places.add(first)
        for start in range(max(first, last - self._longest), last):
            if text[start:last] in self._beginnings and _tells(text[start:last]):
                places.add(start)
        if 0 < last - first < self._longest and _tells(text[first:last]) and text[first:last] in self._inner:
            places.add(first)
        return sorted(places)


@dataclass(frozen=True, slots=True)
class Protection:
    """The stand-ins of one rendering, and which characters they stand for."""

    tokens: ControlTokens
    meaning: Mapping[str, str]

    def restore(self, text: str) -> str:
        """What the callers wrote, as it was."""
        return self._stand_in().sub(self._original, text)

    def settle(self, rendered: str) -> str:
        """The prompt, in pieces wherever it has to be cut to keep callers' text from becoming control tokens."""
        kept, places, position, length = [], [], 0, 0
        for found in self._stand_in().finditer(rendered):
            kept.append(rendered[position : found.start()])
            length += found.start() - position
            places.append(length)
            kept.append(self._original(found))
            length += 1
            position = found.end()
        text = "".join([*kept, rendered[position:]])
        matches = self.tokens.matches(text)
        cuts = _cuts(places, matches)
        return _in_pieces(text, cuts, matches) if cuts else text

    def _stand_in(self) -> re.Pattern[str]:
        """A stand-in, or what JSON with ASCII letters only makes of one."""
        characters = "".join(self.meaning)
        codes = "|".join(f"{ord(character):04x}" for character in self.meaning)
        return re.compile(rf"[{characters}]|\\u(?:{codes})")

    def _original(self, found: re.Match[str]) -> str:
        written = found[0]
        return self.meaning[written if len(written) == 1 else chr(int(written[2:], 16))]


def _cuts(places: list[int], matches: list[tuple[int, int]]) -> list[int]:
    """One place strictly inside of each match that holds a caller's character."""
    cuts = set()
    index = 0
    for start, end in matches:
        while index < len(places) and places[index] < start:
            index += 1
        if index < len(places) and places[index] < end:
            cuts.add(max(places[index], start + 1))
    return sorted(cuts)


def _in_pieces(text: str, cuts: list[int], matches: list[tuple[int, int]]) -> PromptText:
    """After a cut the text goes on until the template's next control token; from there on all is as usual."""
    pieces = [Piece(text[: cuts[0]], False)]
    starts = iter([start for start, end in matches if bisect_right(cuts, start) == bisect_left(cuts, end)])
    own = next(starts, len(text))
    for cut, end in zip(cuts, [*cuts[1:], len(text)], strict=True):
        while own < cut:
            own = next(starts, len(text))
        middle = min(own, end)
        pieces += [Piece(text[cut:middle], True), Piece(text[middle:end], False)]
    prompt = PromptText(text)
    prompt.pieces = tuple(piece for piece in pieces if piece.text)
    return prompt


def longest_match(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds tokens from left to right, the longest at each place, as tokenizers do. None of them may be empty."""
    pattern = _pattern(_trie(sorted(set(tokens))))
    return re.compile(pattern or "(?!)", re.DOTALL)


def _tells(part: str) -> bool:
    """Whether it holds more than letters, digits, underscores and spaces."""
    return any(not (character.isalnum() or character.isspace() or character == "_") for character in part)


def _collect(value: Any, strings: list[str]) -> None:
    """All strings and keys in `value`."""
    if isinstance(value, str):
        strings.append(value)
    elif isinstance(value, list | tuple):
        for inner in value:
            _collect(inner, strings)
    elif isinstance(value, dict):  # by far the most mappings; asking for `Mapping` takes longer
        for key, inner in value.items():
            _collect(key, strings)
            _collect(inner, strings)
    elif value is not None and isinstance(value, Mapping):
        _collect(dict(value), strings)


def _exchanged(value: Any, changed: Mapping[str, str]) -> Any:
    """A copy of `value` with other strings and keys."""
    if isinstance(value, str):
        return changed.get(value, value)
    if isinstance(value, Mapping):
        return {_exchanged(key, changed): _exchanged(inner, changed) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_exchanged(inner, changed) for inner in value]
    return value


def _unused(characters: Sequence[str], texts: str) -> dict[str, str]:
    """A stand-in for each of the characters that is nowhere in `texts` (lower case), neither itself nor its JSON code.

    Raises `ValueError` for a text that uses the whole script.
    """
    present = set(texts)
    free = (chr(code) for code in _STAND_INS if chr(code) not in present and f"\\u{code:04x}" not in texts)
    chosen = dict(zip(characters, free, strict=False))
    if len(chosen) < len(characters):
        raise ValueError("the texts use every character that could stand in for a control token's")
    return chosen


def _trie(tokens: Iterable[str]) -> _Trie:
    root: _Trie = {}
    for token in tokens:
        node = root
        for character in token:
            node = node.setdefault(character, {})
        node[""] = {}
    return root


def _pattern(node: _Trie) -> str:
    """A regular expression for the longest token that goes on from here."""
    branches = [re.escape(character) + _pattern(inner) for character, inner in node.items() if character]
    if not branches:
        return ""
    if len(branches) == 1 and "" not in node:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if '' in node else ''}"
