"""The rule `repeats`: a passage that stood word for word before gives way to a short note.

A passage is a paragraph or a whole fenced block. Only what stood before decides, so that messages stay as they are
whatever is said later; of a user's message the last passage always stays: it is what they ask. Time grows with the
length of the text; passages are compared by their digests, which are too long to collide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from headstart.prompt.lines import fenced

NOTE = "[repeated above]"
LEAST_CHARACTERS = 160  # about 40 tokens: shorter ones are refrains, lists and signatures


@dataclass(slots=True)
class Seen:
    """The passages of a request so far."""

    _digests: set[bytes] = field(default_factory=set)

    def note(self, text: str) -> None:
        """Remember a text that is not to be cut."""
        for passage in _passages(text):
            self._is_new(passage)

    def cut(self, text: str, *, keep_last: bool) -> str:
        """The text without passages that stood before, in this text or another; a run of them leaves one note."""
        parts = list(_passages(text))
        last = max((at for at, part in enumerate(parts) if part.strip()), default=-1)
        kept: list[str] = []
        in_run = False
        for at, part in enumerate(parts):
            if not part.strip():
                if not in_run:
                    kept.append(part)
                continue
            repeated = not self._is_new(part) and not (keep_last and at == last)
            if repeated and not in_run:
                kept.append(NOTE)
            elif not repeated:
                if in_run:
                    kept.append(parts[at - 1])  # what stood between the run and this
                kept.append(part)
            in_run = repeated
        if in_run and parts and not parts[-1].strip():
            kept.append(parts[-1])
        return "".join(kept)

    def _is_new(self, passage: str) -> bool:
        """Short ones are always new."""
        bare = passage.strip()
        if len(bare) < LEAST_CHARACTERS:
            return True
        digest = hashlib.blake2b(bare.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._digests:
            return False
        self._digests.add(digest)
        return True


def _passages(text: str) -> Iterator[str]:
    """Passages and what stands between them, in turn; joined they are the text."""
    lines = text.splitlines(keepends=True)
    code = fenced([line.rstrip("\r\n") for line in lines])
    current: list[str] = []
    kind = ""
    for at, line in enumerate(lines):
        now = "code" if code[at] else "text" if line.strip() else "blank"
        if current and now != kind:
            yield from _split_end("".join(current))
            current = []
        current.append(line)
        kind = now
    if current:
        yield from _split_end("".join(current))


def _split_end(block: str) -> Iterator[str]:
    """A block, then the end of its last line."""
    bare = block.rstrip("\r\n")
    if bare.strip():
        yield bare
        if block != bare:
            yield block[len(bare) :]
    else:
        yield block
