"""Arrival traces: Mooncake's jsonl (with `hash_ids` that say what is shared) and Azure's csv. Files in, rows out."""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from headstart.bench.options import BenchError

MOONCAKE_BUCKET_S = 3.0  # its arrivals are rounded down to this
MOONCAKE_BLOCK_TOKENS = 512  # tokens that one hash id stands for


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request: `at` in seconds, lengths in tokens; `blocks` are the `(id, tokens)` that make its input."""

    at: float
    input_length: int
    output_length: int
    blocks: tuple[tuple[int, int], ...] = ()


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, *, shrink: float, speed: float, limit: int | None, seed: int) -> list[TraceRow]:
    """Rows in order of arrival, lengths divided by `shrink`, times by `speed`. `BenchError` names a broken row."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(itertools.islice(_parse(path, lines), limit))
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read the trace {path}: {error}") from None
    if not rows:
        raise BenchError(f"{path} holds no requests")
    if path.suffix != ".csv":
        rows = _spread(rows, random.Random(seed))
    began = min(row.at for row in rows)
    rows.sort(key=lambda row: row.at)
    return [_scaled(row, began, shrink, speed) for row in rows]


def _parse(path: Path, lines: Iterator[str]) -> Iterator[TraceRow]:
    return _parse_azure(path, lines) if path.suffix == ".csv" else _parse_mooncake(path, lines)


def _parse_mooncake(path: Path, lines: Iterator[str]) -> Iterator[TraceRow]:
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = decode(line)
        except msgspec.DecodeError as error:
            raise BenchError(f"{path}, row {number}: {error}") from None
        if item.input_length < 1 or item.output_length < 0 or item.timestamp < 0:
            raise BenchError(f"{path}, row {number}: lengths and timestamp must not be negative, input_length not 0")
        needed = -(-item.input_length // MOONCAKE_BLOCK_TOKENS)
        if len(item.hash_ids) != needed:
            raise BenchError(
                f"{path}, row {number}: input_length {item.input_length} needs {needed} hash_ids of "
                f"{MOONCAKE_BLOCK_TOKENS} tokens, but there are {len(item.hash_ids)}"
            )
        sizes = [MOONCAKE_BLOCK_TOKENS] * (needed - 1) + [item.input_length - MOONCAKE_BLOCK_TOKENS * (needed - 1)]
        blocks = tuple(zip(item.hash_ids, sizes, strict=True))
        yield TraceRow(item.timestamp / 1e3, item.input_length, max(1, item.output_length), blocks)


def _parse_azure(path: Path, lines: Iterator[str]) -> Iterator[TraceRow]:
    reader = csv.DictReader(lines)
    missing = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(reader.fieldnames or ())
    if missing:
        raise BenchError(f"{path} is no Azure trace: its first line lacks {', '.join(sorted(missing))}")
    for number, item in enumerate(reader, 2):
        try:
            at = datetime.fromisoformat(item["TIMESTAMP"]).timestamp()
            row = TraceRow(at, int(item["ContextTokens"]), max(1, int(item["GeneratedTokens"])))
        except (ValueError, TypeError) as error:
            raise BenchError(f"{path}, row {number}: {error}") from None
        if row.input_length < 1:
            raise BenchError(f"{path}, row {number}: ContextTokens is {row.input_length}; it must be at least 1")
        yield row


def _spread(rows: list[TraceRow], rng: random.Random) -> list[TraceRow]:
    """Move arrivals that share a timestamp to random moments of its bucket, in the file's order."""
    spread: list[TraceRow] = []
    for at, group in itertools.groupby(rows, key=lambda row: row.at):
        bucket = list(group)
        moments = sorted(rng.uniform(0, MOONCAKE_BUCKET_S) for _ in bucket)
        spread += [
            TraceRow(at + moment, row.input_length, row.output_length, row.blocks)
            for moment, row in zip(moments, bucket, strict=True)
        ]
    return spread


def _scaled(row: TraceRow, began: float, shrink: float, speed: float) -> TraceRow:
    """Block borders are scaled, not sizes, so that the blocks still sum to the input and equal prefixes stay equal."""
    borders = list(itertools.accumulate((size for _, size in row.blocks), initial=0))
    scaled = [round(border / shrink) for border in borders]
    return TraceRow(
        at=(row.at - began) / speed,
        input_length=max(1, round(row.input_length / shrink)),
        output_length=max(1, round(row.output_length / shrink)),
        blocks=tuple(
            (name, end - start) for (name, _), (start, end) in zip(row.blocks, itertools.pairwise(scaled), strict=True)
        ),
    )
