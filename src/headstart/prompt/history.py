"""What was sent before: which prefix of a prompt is cached, and which earlier prompts it resembles.

Bounded: the latest prompts and characters are remembered, older ones are forgotten.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from headstart.prompt.chat import ChatPrompt, Part
from headstart.prompt.divergence import common_prefix_length
from headstart.prompt.pieces import Piece, pieces_of

MAX_PROMPTS = 4096
MAX_CHARACTERS = 128 * 1024 * 1024
MAX_KEYS = 1_000_000  # prefixes, and pieces; beyond them the index starts anew
_SIBLINGS = 16  # texts that once followed one prefix
_RECENT = 4  # prompts a text, and texts a piece
_CANDIDATES = 3


@dataclass(slots=True)
class Text:
    """A text that some remembered prompt holds. It is kept once, however many hold it."""

    text: str
    pieces: tuple[Piece, ...]
    holders: int = 0
    prompts: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT))


class History:
    """Earlier prompts, numbered as they came. One owner; not thread-safe."""

    def __init__(self, *, max_prompts: int = MAX_PROMPTS, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_prompts = max_prompts
        self._max_characters = max_characters
        self._characters = 0
        self._prompts: OrderedDict[int, ChatPrompt] = OrderedDict()
        self._texts: dict[str, Text] = {}
        self._by_piece: dict[int, deque[Text]] = {}
        self._followers: dict[int, OrderedDict[int, Part]] = {}

    def prompt(self, number: int) -> ChatPrompt:
        return self._prompts[number]

    def text(self, text: str) -> Text:
        """The text with its pieces; remembered already or not."""
        return self._texts.get(text) or Text(text, pieces_of(text))

    def cached(self, prompt: ChatPrompt) -> tuple[int, int]:
        """The longest beginning that some prompt had: whole parts, and characters of the next one."""
        for index, key, part in _prefixes(prompt):
            followers: OrderedDict[int, Part] = self._followers.get(key, OrderedDict())
            if _name(part) not in followers:
                same_role = (other for other in followers.values() if other.role == part.role)
                return index, max((common_prefix_length(other.text, part.text) for other in same_role), default=0)
        return len(prompt.parts), 0

    def similar(self, prompt: ChatPrompt) -> list[int]:
        """Numbers of the prompts that share most text with this one, wherever it stands; most first."""
        scores: Counter[int] = Counter()
        for part in prompt.parts:
            known = self._texts.get(part.text)
            if known is not None:
                self._credit(scores, known, len(part.text))
                continue
            for piece in pieces_of(part.text):
                for other in self._by_piece.get(piece.key, ()):
                    self._credit(scores, other, piece.length)
        ranked = sorted(scores.items(), key=lambda item: (-item[1], -item[0]))
        return [number for number, _ in ranked if self._prompts[number].model == prompt.model][:_CANDIDATES]

    def add(self, number: int, prompt: ChatPrompt) -> None:
        """Remember it under a number that grows from call to call."""
        parts = []
        for part in prompt.parts:
            text = self._remember(part.text)
            text.holders += 1
            text.prompts.append(number)
            parts.append(Part(part.role, part.index, text.text))
        prompt = ChatPrompt(tuple(parts), prompt.model, prompt.salt, prompt.template)
        self._prompts[number] = prompt
        if len(self._followers) > MAX_KEYS:
            self._followers.clear()
        for _, key, part in _prefixes(prompt):
            followers = self._followers.setdefault(key, OrderedDict())
            followers[_name(part)] = part
            followers.move_to_end(_name(part))
            if len(followers) > _SIBLINGS:
                followers.popitem(last=False)
        while len(self._prompts) > self._max_prompts or self._characters > self._max_characters:
            self._forget()

    def _credit(self, scores: Counter[int], text: Text, length: int) -> None:
        for number in text.prompts:
            if number in self._prompts:
                scores[number] += length

    def _remember(self, text: str) -> Text:
        known = self._texts.get(text)
        if known is None:
            known = self._texts[text] = Text(text, pieces_of(text))
            self._characters += len(text)
            if len(self._by_piece) > MAX_KEYS:
                self._by_piece.clear()
            for piece in known.pieces:
                self._by_piece.setdefault(piece.key, deque(maxlen=_RECENT)).append(known)
        return known

    def _forget(self) -> None:
        _, prompt = self._prompts.popitem(last=False)
        for part in prompt.parts:
            text = self._texts[part.text]
            text.holders -= 1
            if not text.holders:
                del self._texts[part.text]
                self._characters -= len(part.text)


def _name(part: Part) -> int:
    return hash((part.role, part.text))


def _prefixes(prompt: ChatPrompt) -> Iterator[tuple[int, int, Part]]:
    """Index of a part, a key of all that stands before it, the part."""
    key = hash((prompt.model, prompt.salt, prompt.template))
    for index, part in enumerate(prompt.parts):
        yield index, key, part
        key = hash((key, _name(part)))
