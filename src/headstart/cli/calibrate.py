"""`headstart calibrate`: measure what steps cost here, and keep it for servers to come. Owns the command and its table.

Measuring happens in a process of its own, which may load torch (`headstart.calibrate`).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from headstart.cli.errors import CommandError, one_line_errors
from headstart.cli.options import SectionedCommand, given, setting_options
from headstart.cli.progress import TerminalProgress
from headstart.core.cost import StepWork
from headstart.engine.process import engine_environment, python_command
from headstart.hub import Progress, resolve
from headstart.launch import EngineSetup, encode_setup, settle_config
from headstart.perf.calibration import (
    CalibrationFailure,
    CalibrationMessage,
    CalibrationReport,
    PredictionErrors,
)
from headstart.perf.checkpoint import read_checked_spec
from headstart.perf.cost_model import FEW_ROWS, Coefficients, FittedCostModel
from headstart.settings import SETTINGS, settle

# What decides how long steps take, or which there are; whatever else a configuration holds has no say here.
_DECIDE = frozenset(
    {
        *("device", "dtype", "quantization", "max_model_len", "threads", "block_size", "kv_cache_dtype"),
        *("kv_cache_memory", "max_num_batched_tokens", "max_num_seqs", "slo_tpot_ms", "max_chunk_ms"),
    }
)
_OTHERS = frozenset(setting.name for setting in SETTINGS) - _DECIDE
_MODULE = "headstart.calibrate"
# Of coefficients: what it is, and for how many of it a readable number is shown.
_ROWS = (
    ("step", "a step by itself: weights are read, the rest waits", 1),
    ("row", "a token of a prompt, or a decode", 1),
    ("few_rows", f"the same, what each of the first {FEW_ROWS} costs more", 1),
    ("prefill_context", "1,000 tokens of context that a token of a prompt attends to", 1000),
    ("decode_context", "1,000 tokens of context that a decode attends to", 1000),
    ("sample", "a row that yields a token", 1),
)
_EXAMPLES = (
    ("the first 128 tokens of a prompt", StepWork().with_prefill(0, 128, samples=False)),
    ("128 tokens behind a context of 4,096", StepWork().with_prefill(4096, 128, samples=False)),
    ("1 decode at a context of 1,024", StepWork(num_decodes=1, decode_context=1024, num_samples=1)),
    ("16 of them", StepWork(num_decodes=16, decode_context=16 * 1024, num_samples=16)),
)


@click.command(cls=SectionedCommand)
@click.argument("model", required=False)
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="The TOML file that the server is started with.",
)
@click.option(
    "--seconds", type=click.IntRange(5, 600), default=60, show_default=True, help="How long to measure, after loading."
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write everything there.")
@setting_options(without=_OTHERS)
def calibrate(model: str | None, config_file: Path | None, seconds: int, json_file: Path | None, **flags: Any) -> None:
    """Measure how long steps of MODEL take on this machine, and keep it for `headstart serve`.

    The server then predicts well from its first request on.

    Steps of all kinds and sizes run in random order; costs are fitted to four fifths of them and tried on the rest. The
    machine should do nothing else meanwhile. Give the settings that the server is started with: costs are kept for each
    model, device, format, block size and number of threads. A server corrects them by every step that it runs.

    Exit code: 0; 1 if it could not run; 2 if the command line is wrong; 130 after Ctrl-C, with nothing kept.
    """
    with one_line_errors():
        config = settle(given({"model": model, **flags}), os.environ, config_file)
        with TerminalProgress() as progress:
            files = resolve(config.model.model, progress=progress)
            spec = read_checked_spec(files)
            report = run(EngineSetup(settle_config(config, spec), files, spec), seconds, progress)
        if json_file is not None:
            _write(report, json_file)
        print_calibration(report, Console())


def run(setup: EngineSetup, seconds: int, progress: Progress) -> CalibrationReport:
    """Measure in a process of its own. Raises `CommandError`, one line that says what to do."""
    with subprocess.Popen(
        [*python_command(_MODULE), str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,  # Ctrl-C in the terminal is for the command, which then ends the process
        env=engine_environment(os.environ),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        report = None
        try:
            process.stdin.write(encode_setup(setup))
            process.stdin.close()
            for line in process.stdout:
                message = msgspec.json.decode(line, type=CalibrationMessage)
                if isinstance(message, CalibrationFailure):
                    raise CommandError(message.message)
                elif isinstance(message, CalibrationReport):
                    report = message
                else:
                    progress(message.stage, message.done, message.total)
        except BaseException:
            process.kill()
            raise
    if report is None or process.returncode != 0:
        raise CommandError(f"the process that measures ended with exit code {process.returncode}; see its lines above")
    return report


def _write(report: CalibrationReport, path: Path) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from None


def print_calibration(report: CalibrationReport, console: Console) -> None:
    """Coefficients with units, what they mean for some steps, and how well they predict; 80 columns."""
    found = report.calibration
    num_steps = found.num_fitted + found.errors.count
    console.print(f"[bold]{report.model}[/]  {report.summary}", highlight=False)
    console.print(f"{num_steps} steps in {report.seconds:.0f} s, load before {report.load:.1f}", highlight=False)
    costs = _table("What a step costs: the sum of", "", "ms")
    for name, words, count in _ROWS:
        costs.add_row(words, _milliseconds(found.coefficients[name] * count))
    console.print(costs)
    model = FittedCostModel(Coefficients(**found.coefficients))
    examples = _table("So a step takes, with", "", "ms")
    for words, work in _EXAMPLES:
        examples.add_row(words, _milliseconds(model.step_seconds(work)))
    console.print(examples)
    errors = _table("How well steps that were held out are predicted", "", "steps", "median error", "90th percentile")
    for words, each in [*found.errors_by_kind.items(), ("all", found.errors)]:
        errors.add_row(words, *_cells(each))
    errors.add_section()
    errors.add_row("as learned before" if report.was_known else "as guessed before", *_cells(found.errors_before))
    console.print(errors)
    console.print(f"kept in {report.file}: the next server begins with it", highlight=False, soft_wrap=True)


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _cells(errors: PredictionErrors) -> tuple[str, str, str]:
    return str(errors.count), f"{errors.median:.1%}", f"{errors.p90:.1%}"


def _milliseconds(seconds: float) -> str:
    """Three digits."""
    value = seconds * 1000
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"
