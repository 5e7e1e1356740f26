"""Tokenize once: agent sessions replayed message by message. Are the hits and the tokenizing what they could be?

Starts a server of its own with default settings, sends every prompt that the sessions' agents saw, in order, and reads
`cached_tokens` and the ledger's `tokenize`. A session ends where it no longer fits the model's context. Each is played
several times, by new servers: of a turn, the median time to tokenize counts, and the worst hit.

- `replay`: the assistant's turns are those of the session. What a turn could reuse is the whole prompt before it, in
  whole blocks.
- `own`: the assistant's turns are the server's own answers; a turn could reuse the prompt before it and the answer, of
  which only the last token was never computed.

    python benchmarks/tokenize_once.py                        # sessions in ../shared/data/prompts/swe-agent
    python benchmarks/tokenize_once.py --sessions FOLDER
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _verdict import Bar, finish, run_main, show

from headstart.bench.options import BenchError
from headstart.cli.client import Answer, ServerError
from headstart.cli.local_server import LocalServer
from headstart.config import DEFAULT_MODEL, CacheConfig

SESSIONS = Path("../shared/data/prompts/swe-agent")
HIT_BAR, TOKENIZE_BAR_MS = 0.95, 5.0
OWN_TOKENS = 40
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """`reusable`: tokens in whole blocks that the turn before left; `tokenize`: milliseconds."""

    reusable: int
    cached: int
    tokenize: float

    @property
    def hit(self) -> float:
        return min(1.0, self.cached / self.reusable) if self.reusable else 1.0


def read_session(path: Path) -> list[Message]:
    """A session's messages as plain text; what a tool said comes from the user."""
    roles = {"system": "system", "assistant": "assistant"}
    history = json.loads(path.read_text())["history"]
    return [{"role": roles.get(item["role"], "user"), "content": text_of(item.get("content"))} for item in history]


def text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def prompts_of(session: list[Message]) -> Iterator[list[Message]]:
    """Up to each message of the assistant that follows one of the user."""
    for index in range(1, len(session)):
        if session[index]["role"] == "assistant" and session[index - 1]["role"] == "user":
            yield session[:index]


def play(server: LocalServer, session: list[Message], *, own: bool) -> list[Turn]:
    turns: list[Turn] = []
    answers: dict[int, str] = {}
    before: Answer | None = None
    for prompt in prompts_of(session):
        messages = [{**item, "content": answers.get(index, item["content"])} for index, item in enumerate(prompt)]
        try:
            answer = server.client.chat(
                server.model, messages, max_tokens=OWN_TOKENS if own else 1, temperature=0, ignore_eos=False
            )
        except ServerError as error:
            if "context" not in str(error):
                raise
            break  # it no longer fits
        if own:
            answers[len(prompt)] = answer.text
        left = 0 if before is None else before.num_prompt_tokens + (before.num_output_tokens - 1 if own else 0)
        size = CacheConfig().block_size
        turns.append(Turn(left // size * size, answer.num_cached_tokens, 1000 * dict(answer.timing)["tokenize"]))
        before = answer
    return turns


def play_again(model: str, session: list[Message], *, own: bool, repeats: int) -> list[Turn]:
    """By a new server each time, so that nothing of it is known beforehand."""
    plays = []
    for _ in range(repeats):
        with LocalServer(model) as server:
            plays.append(play(server, session, own=own))
    return [
        Turn(
            turns[0].reusable,
            min(turn.cached for turn in turns),
            statistics.median(turn.tokenize for turn in turns),
        )
        for turns in zip(*plays, strict=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--sessions", type=Path, default=SESSIONS, metavar="FOLDER")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    paths = sorted(args.sessions.glob("*.traj"))
    if not paths:
        raise BenchError(f"no .traj files in {args.sessions}: name their folder with --sessions")
    rows: list[list[str]] = []
    bars: list[Bar] = []
    results: dict[str, Any] = {}
    for own in (False, True):
        later: list[Turn] = []
        name = "own" if own else "replay"
        for path in paths:
            turns = play_again(args.model, read_session(path), own=own, repeats=args.repeats)
            later += turns[1:]
            if len(turns) < 2:
                continue
            rows.append(row_of(f"{name}: {path.stem[:24]}", turns))
            results[f"{name} {path.stem}"] = [[turn.reusable, turn.cached, turn.tokenize] for turn in turns]
        bars.append(
            Bar(f"{name}: hits of what a turn could reuse, worst turn", min(t.hit for t in later), HIT_BAR, False)
        )
        bars.append(
            Bar(f"{name}: ms to tokenize, worst later turn", max(t.tokenize for t in later), TOKENIZE_BAR_MS, True)
        )
    columns = ["session", "turns", "last reusable", "hit, worst", "tokenize first", "later, median", "later, most"]
    show("Tokenize once (ms)", columns, rows, bars)
    return finish(args.json, results, bars)


def row_of(name: str, turns: list[Turn]) -> list[str]:
    later = [turn.tokenize for turn in turns[1:]]
    return [
        name,
        str(len(turns)),
        f"{turns[-1].reusable:,}",
        f"{min(turn.hit for turn in turns[1:]):.1%}",
        f"{turns[0].tokenize:.2f}",
        f"{statistics.median(later):.2f}",
        f"{max(later):.2f}",
    ]


if __name__ == "__main__":
    sys.exit(run_main(main))
