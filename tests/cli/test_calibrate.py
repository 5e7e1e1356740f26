"""`headstart calibrate`: a whole run on stories260K, its table, and how it ends when something is wrong."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from headstart import replica
from headstart.cli.calibrate import calibrate, print_calibration, run
from headstart.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from headstart.engine import process
from headstart.hub import files_of_folder
from headstart.launch import EngineSetup
from headstart.perf import calibration
from headstart.perf.calibration import CalibrationProgress, CalibrationReport
from headstart.perf.model_spec import read_model_spec
from headstart.worker.worker import Worker
from tests.fixtures.stories import make_stories_folder
from tests.perf.test_calibration import measured
from tests.perf.test_cost_model import TRUE


def call(*args: str) -> Result:
    return CliRunner().invoke(calibrate, args)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_stories_folder(tmp_path / "stories")


@pytest.fixture
def setup(folder: Path) -> EngineSetup:
    config = Config(
        ModelConfig(model=str(folder), threads=1, quantization="none"),
        CacheConfig(kv_cache_memory=1 << 20),
        SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4),
    )
    files = files_of_folder(folder)
    return EngineSetup(config, files, read_model_spec(files))


def test_a_run_on_a_small_model_is_what_the_next_engine_begins_with(
    folder: Path, setup: EngineSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "calibration.json"
    settings = ("--threads", "1", "--quantization", "none", "--kv-cache-memory", "1MiB")
    limits = ("--max-num-batched-tokens", "64", "--max-num-seqs", "4")
    result = call(str(folder), "--seconds", "5", "--json", str(path), *settings, *limits)
    assert result.exit_code == 0, result.output
    for text in ("stories", "a step by itself", "median error", "as guessed before", "kept in"):
        assert text in result.output, text
    report = msgspec.json.decode(path.read_bytes(), type=CalibrationReport)
    found = report.calibration
    assert report.threads == 1
    assert not report.was_known
    assert 5 <= report.seconds < 20
    assert len(found.steps) == found.num_fitted + found.errors.count > 100
    assert set(found.errors_by_kind) == {"prefill", "decode", "mixed"}
    assert max(step.work["num_decodes"] for step in found.steps) == 4
    assert max(step.work["num_prefill_tokens"] for step in found.steps) <= 64
    assert Path(report.file).parent == tmp_path / "cache" / "costs"

    config = replica.settle_config(setup.config, setup.spec)
    executor, started, _ = replica.start_executor(config, Worker(config, setup.files, setup.spec), None)
    executor.shutdown()
    costs = replica.make_costs(config, setup.files, setup.spec, started)
    assert costs.was_known
    fitted = json.loads(Path(report.file).read_text())["coefficients"]
    assert costs.coefficients.values() == tuple(fitted.values())
    assert costs.coefficients.row >= found.coefficients["row"]


def report() -> CalibrationReport:
    return CalibrationReport(
        version="0",
        started_at="",
        model="a model",
        summary="llama, 134.5M parameters on cpu, float32, 2 threads, weights 97 MB, KV pool 524,288 tokens (12 GB)",
        threads=2,
        load=0.1,
        seconds=60.0,
        was_known=True,
        file="/home/somebody/.cache/headstart/costs/0123456789abcdef0123456789abcdef.json",
        calibration=calibration.calibrate(measured(100, noise=0.02), TRUE),
    )


def test_the_table_fits_a_narrow_terminal_and_says_units() -> None:
    out = io.StringIO()
    print_calibration(report(), Console(file=out, width=80))
    printed = out.getvalue()
    assert "…" not in printed
    rows = [line.rpartition(" ") for line in map(str.strip, printed.splitlines()) if line]
    found = [float(number) for words, _, number in rows if words.startswith(("a step by", "1,000 tokens"))]
    milliseconds = [1000 * TRUE.step, 1e6 * TRUE.prefill_context, 1e6 * TRUE.decode_context]
    assert found == pytest.approx(milliseconds, rel=0.2)
    assert "as learned before" in printed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--seconds", "4"), "4 is not in the range"),
        (("--policy", "fcfs"), "No such option"),
        (("--threads", "0"), "threads is 0; it must be from 1"),
        (("--threads", "2", "--device", "cuda"), "threads has no effect with device cuda"),
    ],
)
def test_options_that_cannot_work_are_refused(arguments: tuple[str, ...], text: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert text in result.output


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    result = call(str(tmp_path / "none.gguf"))
    assert result.exit_code == 1
    assert "none.gguf" in result.output


def test_a_context_that_the_model_does_not_have_is_one_line(folder: Path) -> None:
    result = call(str(folder), "--max-model-len", "513")
    assert result.exit_code == 1
    assert "the model's context is 512 tokens" in result.output


def test_what_stops_the_measuring_process_is_passed_on(folder: Path) -> None:
    result = call(str(folder), "--max-model-len", "512", "--kv-cache-memory", "64KiB", "--quantization", "none")
    assert result.exit_code == 1
    assert result.output.startswith("error: ")
    assert "kv_cache_memory" in result.output


def fake_python(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for the process that measures."""
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(process.sys, "executable", str(path))


def test_a_process_that_dies_is_said(
    folder: Path, setup: EngineSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = msgspec.json.encode(CalibrationProgress("sweep", 1, 2)).decode()
    fake_python(tmp_path, f"import sys; sys.stdin.read(0); print({said!r}); raise SystemExit(3)", monkeypatch)
    seen: list[tuple[str, int, int | None]] = []
    with pytest.raises(Exception, match="ended with exit code 3"):
        run(setup, 60, lambda *args: seen.append(args))
    assert seen == [("sweep", 1, 2)]


def test_ctrl_c_ends_the_measuring_process_too(
    setup: EngineSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import json, os, threading\n"
        "print(json.dumps({'type': 'progress', 'stage': 'sweep', 'done': os.getpid(), 'total': None}), flush=True)\n"
        "threading.Event().wait()"
    )
    fake_python(tmp_path, script, monkeypatch)
    pids = []

    def interrupt(stage: str, done: int, total: int | None, /) -> None:
        pids.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(setup, 60, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_place_that_cannot_be_written_is_one_line_but_what_was_found_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.cli.calibrate.run", lambda *args: report())
    result = call(str(folder), "--json", str(tmp_path / "none" / "x.json"))
    assert result.exit_code == 1
    assert "x.json cannot be written: No such file or directory" in result.output
