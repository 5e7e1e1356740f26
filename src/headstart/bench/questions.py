"""Two-turn conversations for the chat workload: a small set of our own, or a file in MT-bench's form."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headstart.bench.options import BenchError

BUILT_IN: tuple[tuple[str, ...], ...] = (
    ("Plan a weekend in a small harbour town for two friends.", "It will rain all Saturday. Change the plan."),
    ("Explain to a ten-year-old why the sea is salty.", "Now explain it in two sentences to a chemist."),
    (
        "Write a Python function that merges two sorted lists.",
        "Make it work for any number of lists and say what it costs.",
    ),
    ("A train leaves at 9:40 and needs 2 h 35 min. When does it arrive?", "It is 18 minutes late. And now?"),
    ("Draft a polite note that asks a neighbour to turn the music down at night.", "Make it half as long and warmer."),
    ("Name three causes of the fall of Rome that historians argue about.", "Which has the weakest evidence, and why?"),
    ("Describe a forest after snowfall in four lines.", "Rewrite it without naming any colour."),
    ("Which is heavier, a litre of water or a litre of ice? Why?", "What does that mean for fish in winter?"),
)


class _Question(msgspec.Struct):
    turns: list[str]


def read_questions(path: Path | None, limit: int) -> list[tuple[str, ...]]:
    """Exactly `limit` conversations, from the start again if there are fewer. Raises `BenchError`."""
    conversations = list(BUILT_IN) if path is None else _read_file(path)
    return [conversations[index % len(conversations)] for index in range(limit)]


def _read_file(path: Path) -> list[tuple[str, ...]]:
    decode = msgspec.json.Decoder(_Question).decode
    found: list[tuple[str, ...]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read the questions {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            turns = tuple(decode(line).turns)
        except msgspec.DecodeError as error:
            raise BenchError(f"{path}, row {number}: {error}") from None
        if not turns or not all(turns):
            raise BenchError(f"{path}, row {number}: turns must hold at least one text and none that is empty")
        found.append(turns)
    if not found:
        raise BenchError(f"{path} holds no questions")
    return found
