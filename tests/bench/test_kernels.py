"""`headstart bench --kernels`: the arithmetic of rooflines, the table, refused options, and a run on stories260K."""

from __future__ import annotations

import io
import json
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from headstart.bench import kernels
from headstart.bench.command import bench
from headstart.bench.kernel_report import (
    ComputePeak,
    KernelReport,
    Mix,
    Operation,
    ReadPeak,
    Work,
    attended_pairs,
    roofline,
)
from headstart.bench.kernel_table import duration, print_kernel_report
from headstart.bench.kernels import run_kernels
from headstart.bench.options import BenchError
from tests.fixtures.stories import make_stories_folder

PEAKS: dict[Mix, float] = {"float32": 100.0, "int8": 200.0, "int4": 400.0}


def test_the_longer_of_computing_and_reading_is_the_roof() -> None:
    assert roofline([Work("int8", 2e9)], 1e6, PEAKS, 10.0) == (pytest.approx(0.01), "compute")
    assert roofline([Work("int8", 2e6)], 1e9, PEAKS, 10.0) == (pytest.approx(0.1), "memory")
    # Parts of different mixes take their times one after the other.
    assert roofline([Work("int8", 2e9), Work("int4", 4e9)], 0, PEAKS, 10.0)[0] == pytest.approx(0.02)


@pytest.mark.parametrize(("rows", "context"), [(1, 1), (1, 7), (5, 5), (3, 8)])
def test_pairs_are_those_of_a_causal_mask(rows: int, context: int) -> None:
    mask = [[key <= query for key in range(context)] for query in range(context - rows, context)]
    assert attended_pairs(rows, context) == sum(map(sum, mask))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0000123, "12.3 us"), (0.00456, "4.56 ms"), (1.23, "1.23 s"), (0.9997, "1000 ms")]
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def report(threads: int = 2) -> KernelReport:
    operation = Operation(
        name="qkv", rows=16, context=None, format="q4_1", work=[Work("int4", 4e6)], num_bytes=1e6,
        seconds=1e-3, median_seconds=2e-3, bound="memory", share=0.5,
    )  # fmt: skip
    return KernelReport(
        version="0", started_at="", cpu="a cpu", load=1.0, model="m", threads=threads, instruction_set="avx2", rounds=5,
        compute_peaks=[ComputePeak(instruction_set="avx2", mix="int4", one_thread=300.0, all_threads=600.0)],
        read_peaks=[ReadPeak(level="DRAM", one_thread=10.0, all_threads=20.0)],
        operations=[operation],
    )  # fmt: skip


def test_speeds_are_per_second() -> None:
    (operation,) = report().operations
    assert operation.gops == pytest.approx(4.0)
    assert operation.gigabytes_per_s == pytest.approx(1.0)


def test_the_table_holds_peaks_and_operations() -> None:
    out = io.StringIO()
    print_kernel_report(report(), Console(file=out, width=80))
    printed = out.getvalue()
    assert "…" not in printed  # nothing is cut off on the narrowest of terminals
    for text in ("a cpu", "300.0", "600.0", "20.0", "GB/s", "qkv", "q4_1", "1 ms", "1.0 GB/s", "50%", "2 threads"):
        assert text in printed, text


def call(*args: str) -> Result:
    return CliRunner().invoke(bench, args)


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [(("--url", "http://x"), "--url"), (("-n", "3"), "--requests"), (("--respect-eos",), "--ignore-eos")],
)
def test_options_of_a_server_are_refused(arguments: tuple[str, ...], flag: str) -> None:
    result = call("--kernels", *arguments)
    assert result.exit_code == 2
    assert f"{flag} does nothing with --kernels" in result.output


def test_threads_are_for_kernels() -> None:
    result = call("--threads", "2")
    assert result.exit_code == 2
    assert "--threads does nothing without --kernels" in result.output


def fake_python(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for the process that measures."""
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(kernels.sys, "executable", str(path))


def test_what_cannot_be_measured_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.dumps({"type": "failure", "message": "the native kernels are not built"})
    fake_python(tmp_path, f"print({said!r}); raise SystemExit(1)", monkeypatch)
    result = call("--kernels")
    assert result.exit_code == 1
    assert "the native kernels are not built" in result.output


def test_a_process_that_dies_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.dumps({"type": "progress", "done": 1, "total": 2})
    fake_python(tmp_path, f"print({said!r}); raise SystemExit(3)", monkeypatch)
    seen = []
    with pytest.raises(BenchError, match="exit code 3"):
        run_kernels("m", None, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2)]


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    result = call("--kernels", "--model", str(tmp_path / "none.gguf"))
    assert result.exit_code == 1
    assert "none.gguf" in result.output


def test_a_run_on_a_small_model(tmp_path: Path) -> None:
    model, path = make_stories_folder(tmp_path / "stories"), tmp_path / "kernels.json"
    result = call("--kernels", "--model", str(model), "--threads", "2", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "share" in result.output
    written = json.loads(path.read_text())
    assert written["threads"] == 2
    operations = {(each["name"], each["rows"]): each for each in written["operations"]}
    names = ("qkv", "output", "gate_up", "down", "mlp", "LM head")
    assert set(operations) == {
        *((name, rows) for name in names for rows in (1, 16, 128, 512)),
        ("attention, prefill", 512),
        ("attention, decode", 1),
    }  # the model's context is 512: none of 4,096
    assert {each["format"] for name, each in operations.items() if "attention" not in name[0]} == {"q8_0"}
    assert all(each["seconds"] > 0 and each["share"] > 0 for each in operations.values())
    assert [each["level"] for each in written["read_peaks"]] == ["L2", "L3", "DRAM"]
    assert all(each["one_thread"] > 0 for each in written["compute_peaks"])
