"""Traces: both formats, what is shared, how lengths and times scale, and what a broken row gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headstart.bench.options import BenchError
from headstart.bench.traces import MOONCAKE_BUCKET_S, TraceRow, read_trace

DATA = Path(__file__).parents[3] / "shared" / "data" / "traces"


def mooncake(timestamp: float, length: int, ids: list[int], output: int = 5) -> str:
    return json.dumps({"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": ids})


def read(path: Path, *, shrink: float = 1, speed: float = 1, limit: int | None = None, seed: int = 0) -> list[TraceRow]:
    return read_trace(path, shrink=shrink, speed=speed, limit=limit, seed=seed)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        mooncake(0, 600, [1, 2]),
        mooncake(0, 1024, [1, 3]),
        "",
        mooncake(3000, 100, [9]),
        mooncake(3000, 512, [1]),
    ]
    path.write_text("\n".join(lines))
    return path


def test_mooncake_rows_keep_their_blocks(trace: Path) -> None:
    rows = read(trace)
    assert [row.input_length for row in rows] == [600, 1024, 100, 512]
    assert [row.blocks for row in rows] == [((1, 512), (2, 88)), ((1, 512), (3, 512)), ((9, 100),), ((1, 512),)]


def test_arrivals_of_a_bucket_are_spread_inside_it_in_order(trace: Path) -> None:
    first, *rest = read(trace)
    assert first.at == 0
    times = [row.at for row in rest]
    assert times == sorted(times)
    assert len(set(times)) == 3
    raw_span = 3.0 + MOONCAKE_BUCKET_S
    assert times[-1] < raw_span
    assert [row.at for row in read(trace, seed=1)] != [row.at for row in read(trace)]
    assert [row.at for row in read(trace, seed=1)] == [row.at for row in read(trace, seed=1)]


def test_shrink_divides_lengths_and_keeps_prefixes_equal(trace: Path) -> None:
    rows = read(trace, shrink=7.5)
    assert [row.input_length for row in rows] == [80, 137, 13, 68]
    for row in rows:
        assert sum(size for _, size in row.blocks) == row.input_length
    assert rows[0].blocks[0] == rows[1].blocks[0] == rows[3].blocks[0]


def test_speed_divides_times(trace: Path) -> None:
    slow, fast = read(trace), read(trace, speed=4)
    assert [row.at / 4 for row in slow] == pytest.approx([row.at for row in fast])


def test_limit_takes_the_first_rows_and_reads_no_further(trace: Path) -> None:
    trace.write_text(trace.read_text() + "\n{broken")
    assert len(read(trace, limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "row 2"),
        ('{"timestamp": 0}', "row 2.*input_length"),
        (mooncake(0, 600, [1]), "row 2.*needs 2 hash_ids.*are 1"),
        (mooncake(0, 0, []), "row 2"),
        (mooncake(-1, 5, [1]), "row 2.*negative"),
        ('{"timestamp":"x","input_length":1,"output_length":1,"hash_ids":[1]}', "row 2.*timestamp"),
    ],
)
def test_a_broken_mooncake_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(mooncake(0, 5, [1]) + "\n" + line)
    with pytest.raises(BenchError, match=message):
        read(path)


def test_azure_rows(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.2300000,100,0\n"
    )
    rows = read(path, shrink=10)
    assert [(row.input_length, row.output_length) for row in rows] == [(481, 1), (10, 1)]
    assert rows[1].at - rows[0].at == pytest.approx(0.25, abs=1e-4)


@pytest.mark.parametrize(
    "row", ["yesterday,1,1", "2023-11-16 18:17:03,many,1", "2023-11-16 18:17:03,1", "2023-11-16,0,1"]
)
def test_a_broken_azure_row_is_named(tmp_path: Path, row: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{row}\n")
    with pytest.raises(BenchError, match="row 2"):
        read(path)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BenchError, match="lacks ContextTokens"):
        read(tmp_path / "other.csv")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(BenchError, match="no requests"):
        read(tmp_path / "empty.jsonl")
    with pytest.raises(BenchError, match="cannot read"):
        read(tmp_path / "missing.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BenchError, match="cannot read"):
        read(tmp_path / "binary.jsonl")


@pytest.mark.skipif(not DATA.is_dir(), reason="the public traces are not beside this checkout")
@pytest.mark.parametrize(
    ("name", "num_rows"),
    [
        ("mooncake_conversation.jsonl", 12_031),
        ("AzureLLMInferenceTrace_code.csv", 8_819),
        ("AzureLLMInferenceTrace_conv.csv", 19_366),
    ],
)
def test_the_public_traces_are_read_whole(name: str, num_rows: int) -> None:
    rows = read(DATA / name, shrink=16)
    assert len(rows) == num_rows
    assert 3000 < rows[-1].at < 3700
