"""Recent prompts, and which of them a new one is nearest to. Owns what is remembered and within which bounds.

Blocks of token ids are looked up by a running hash, as in the prefix cache; where nothing of the beginning is shared,
the latest prompts are compared by the clauses they hold.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from headstart.prompt.rendered import Prompt, common_prefix

_NUM_COMPARED = 32  # latest prompts
_NUM_LOOKED_AT = 1024  # latest prompts, of whatever salt


@dataclass(slots=True)
class Entry:
    """A remembered prompt. `served`: its blocks have been computed, as far as is known."""

    prompt: Prompt
    served: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """What a new prompt finds. `num_tokens`: whole blocks that are remembered from its beginning on; `longest`: who had
    the last of them; `candidates`: prompts to compare with, the latest last."""

    num_tokens: int
    longest: Entry | None
    candidates: tuple[Entry, ...]

    def nearest(self, prompt: Prompt) -> Entry | None:
        """The earlier prompt that the new one goes on from, or else shares most with; None if there is none."""
        entries = [*([self.longest] if self.longest is not None else []), *reversed(self.candidates)]
        shared = [common_prefix(entry.prompt.text, prompt.text) for entry in entries]
        for entry, position in zip(entries, shared, strict=True):
            if position >= entry.prompt.end and entry.prompt.request.salt == prompt.request.salt:
                return entry
        ranked = zip(entries, shared, strict=True)
        best = max(ranked, key=lambda item: (len(item[0].prompt.units & prompt.units), item[1]), default=None)
        return None if best is None else best[0]


class PromptIndex:
    """Remembers prompts up to `max_bytes` and blocks up to `max_blocks`, the least recently used go first."""

    def __init__(self, *, block_size: int, max_blocks: int, max_bytes: int, isolated: bool = False) -> None:
        """`block_size` in tokens. `isolated`: a prompt is compared with those of its own salt only."""
        self._isolated = isolated
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[int, int] = OrderedDict()  # hash of all tokens up to its end -> last prompt with it
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._num_bytes = 0
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_bytes(self) -> int:
        """About what the remembered prompts take."""
        return self._num_bytes

    def add(self, prompt: Prompt) -> tuple[Match, Entry]:
        """What `prompt` finds, and the entry under which it is remembered from now on."""
        hashes = list(self._hashes(prompt.ids, prompt.request.salt))
        count, longest = 0, None
        # The last token is always computed, so a block that ends with it is no hit.
        for key in hashes[: max(0, len(prompt.ids) - 1) // self._block_size]:
            if key not in self._blocks:
                break
            count, longest = count + 1, self._entries.get(self._blocks[key], longest)
        match = Match(count * self._block_size, longest, self._latest(prompt.request.salt))
        return match, self._remember(prompt, hashes)

    def _latest(self, salt: str) -> tuple[Entry, ...]:
        entries: Iterator[Entry] = itertools.islice(reversed(self._entries.values()), _NUM_LOOKED_AT)
        if self._isolated:
            entries = (entry for entry in entries if entry.prompt.request.salt == salt)
        return tuple(itertools.islice(entries, _NUM_COMPARED))[::-1]

    def _hashes(self, ids: array[int], salt: str) -> Iterator[int]:
        data, size = ids.tobytes(), self._block_size * ids.itemsize
        running = hash(salt)
        for start in range(0, len(data) - size + 1, size):
            running = hash((running, data[start : start + size]))
            yield running

    def _remember(self, prompt: Prompt, hashes: list[int]) -> Entry:
        entry = self._entries[self._next] = Entry(prompt)
        self._num_bytes += prompt.num_bytes
        for key in reversed(hashes):  # the deepest first, so that they go first
            self._blocks[key] = self._next
            self._blocks.move_to_end(key)
        self._next += 1
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
        while self._num_bytes > self._max_bytes and len(self._entries) > 1:
            _, oldest = self._entries.popitem(last=False)
            self._num_bytes -= oldest.prompt.num_bytes
        return entry
