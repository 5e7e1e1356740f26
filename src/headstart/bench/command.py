"""The `headstart bench` command: flags to options, a progress bar, a table, a file, an exit code."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, get_args

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress_bar import ProgressBar

from headstart.bench.http import Origin
from headstart.bench.kernel_table import print_kernel_report
from headstart.bench.kernels import run_kernels, write_kernel_report
from headstart.bench.options import ApiName, BenchError, BenchOptions, LengthDist, WorkloadName, validate
from headstart.bench.record import RequestRecord
from headstart.bench.report import Report, write_report
from headstart.bench.run import run
from headstart.bench.table import print_report
from headstart.config import DEFAULT_MODEL

# Options that not every workload has; given to another one they would do nothing, which is an error.
_ONLY_FOR: dict[str, tuple[str, ...]] = {
    "requests": ("idle", "prefix", "hol", "poisson"),
    "lengths": ("idle",),
    "rate": ("poisson", "chat"),
    "prompt_tokens": ("poisson",),
    "output_tokens": ("idle", "prefix", "hol", "poisson", "chat"),
    "prefix_tokens": ("prefix",),
    "suffix_tokens": ("prefix",),
    "short_tokens": ("hol",),
    "long_tokens": ("hol",),
    "streams": ("hol",),
    "stream_tokens": ("hol",),
    "short_interval": ("hol",),
    "file": ("chat", "trace"),
    "shrink": ("trace",),
    "speed": ("trace",),
    "limit": ("chat", "trace"),
    "max_prompt_tokens": ("trace",),
    "ignore_eos": ("idle", "prefix", "hol", "poisson", "trace"),
}
# All that `--kernels` has a use for.
_FOR_KERNELS = ("kernels", "model", "threads", "json_file", "progress")


def _parse_lengths(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is no list of numbers; write for example 128,512,2048", ctx, param
        ) from None


def _parse_dist(ctx: click.Context, param: click.Parameter, value: str | None) -> LengthDist | None:
    try:
        return None if value is None else LengthDist.parse(value)
    except BenchError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def _check_url(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    try:
        if value is not None:
            Origin.parse(value)
    except BenchError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    return value


class Bar:
    """A progress bar of one line on a terminal. Drawing it takes microseconds, in the thread that takes the times.

    A live one of rich would render for milliseconds, in a thread of its own, while the event loop waits for the
    interpreter: it would show up in the very times that are measured. So all its states are rendered before.
    """

    WIDTH = 30
    INTERVAL_S = 0.1

    def __init__(self, out: TextIO, *, shown: bool, several: bool, rounds: int) -> None:
        self._out = out
        self._shown = shown
        self._several = several
        self._rounds = rounds
        self._label = ""
        self._done = self._total = 0
        self._drawn_at = 0.0
        self._bars = _render_bars(Console(file=out), self.WIDTH) if shown else []

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write("\r\x1b[K")

    def preparing(self, target: str) -> None:
        self._write(f"\r\x1b[Kpreparing {target}")

    def round_begins(self, target: str, round_index: int, num_requests: int) -> None:
        name = f"{target} " if self._several else ""
        self._label = name + (f"round {round_index + 1}/{self._rounds}" if self._rounds > 1 else "requests")
        self._done, self._total = 0, max(1, num_requests)
        self._draw()

    def request_ended(self, record: RequestRecord) -> None:
        self._done = min(self._done + 1, self._total)
        if time.monotonic() - self._drawn_at >= self.INTERVAL_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        if self._shown:
            bar = self._bars[self.WIDTH * self._done // self._total]
            self._write(f"\r\x1b[K{self._label} {bar} {self._done}/{self._total}")

    def _write(self, text: str) -> None:
        if self._shown:
            self._out.write(text)
            self._out.flush()


def _render_bars(console: Console, width: int) -> list[str]:
    """The bar as the other commands draw it, from empty to full."""
    bars = []
    for filled in range(width + 1):
        with console.capture() as capture:
            console.print(ProgressBar(width, filled, width), end="")
        bars.append(capture.get().rstrip("\n"))
    return bars


def _default(name: str) -> Any:
    return getattr(BenchOptions(), name)


@click.command(name="bench", short_help="Measure a server's time to first token under load.")
@click.option(
    "--url", callback=_check_url, default=_default("url"), show_default=True, help="The server, with or without /v1."
)
@click.option(
    "--against",
    callback=_check_url,
    metavar="URL",
    help="A second server, measured in turn with the first; prints ratios.",
)
@click.option("--workload", "-w", type=click.Choice(get_args(WorkloadName)), default="idle", show_default=True)
@click.option(
    "--model",
    help="Model to ask for.  [default: the first that the server lists]  With --kernels: alias, folder or .gguf file.",
)
@click.option("--against-model", help="The same, for the second server.")
@click.option("--api", type=click.Choice(get_args(ApiName)), default="chat", show_default=True, help="Which endpoint.")
@click.option(
    "--api-key", envvar=["HEADSTART_API_KEY", "OPENAI_API_KEY"], help="Sent as bearer token; better in the environment."
)
@click.option("--rounds", type=int, default=1, show_default=True, help="Repeat everything; medians are shown.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of arrivals and lengths; words are always fresh.")
@click.option(
    "--requests", "-n", type=int,
    help="idle: of each length [5]; prefix: pairs [5]; hol: short prompts [10]; poisson: in all [60].",
)  # fmt: skip
@click.option(
    "--lengths", callback=_parse_lengths, default="128,512,2048", show_default=True, help="idle: prompt tokens."
)
@click.option("--rate", type=float, default=1.0, show_default=True, help="poisson, chat: arrivals a second.")
@click.option("--prompt-tokens", callback=_parse_dist, default="32-256", show_default=True, help="poisson: N, LOW-HIGH, log:LOW-HIGH or lognormal:MEDIAN:SIGMA.")  # noqa: E501 # fmt: skip
@click.option("--output-tokens", callback=_parse_dist, help="Answer tokens, likewise.  [default: 16; chat 64]")
@click.option("--prefix-tokens", type=int, default=1024, show_default=True, help="prefix: shared tokens.")
@click.option("--suffix-tokens", type=int, default=64, show_default=True, help="prefix: tokens that differ.")
@click.option("--short-tokens", type=int, default=64, show_default=True, help="hol: the short prompts.")
@click.option("--long-tokens", type=int, default=6000, show_default=True, help="hol: the long prompt.")
@click.option("--streams", type=int, default=1, show_default=True, help="hol: chats that run meanwhile.")
@click.option("--stream-tokens", type=int, default=1024, show_default=True, help="hol: answer tokens of such a chat.")
@click.option(
    "--short-interval", type=float, default=1.0, show_default=True, help="hol: seconds between short prompts."
)
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="trace: Mooncake .jsonl or Azure .csv; chat: questions like MT-bench's.")  # noqa: E501 # fmt: skip
@click.option("--shrink", type=float, default=1.0, show_default=True, help="trace: divides all lengths.")
@click.option("--speed", type=float, default=1.0, show_default=True, help="trace: multiplies the arrival rate.")
@click.option("--limit", type=int, help="trace: rows; chat: conversations [10].")
@click.option("--max-prompt-tokens", type=int, help="trace: leave out longer rows (and count them).")
@click.option("--slo-ttft", "slo_ttft_ms", type=float, metavar="MS", help="Goodput: TTFT at most.")
@click.option("--slo-tpot", "slo_tpot_ms", type=float, metavar="MS", help="Goodput: TPOT at most.")
@click.option(
    "--ignore-eos/--respect-eos", default=True, show_default=True, help="Answers of exactly the asked length."
)
@click.option("--check-ledger", is_flag=True, help="Compare the server's TTFT ledger with the client's clock.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds a request.")
@click.option("--connect-timeout", type=float, default=10.0, show_default=True, help="Seconds a connection.")
@click.option("--max-in-flight", type=int, default=4096, show_default=True, help="Requests beyond it count as errors.")
@click.option("--kernels", is_flag=True, help="No server: time this machine's native kernels against its own peaks.")
@click.option("--threads", type=click.IntRange(min=1), help="kernels: compute threads.  [default: the usable cores]")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write everything there.")
@click.option("--progress/--no-progress", default=True, help="The progress bar (never without a terminal).")
@click.pass_context
def bench(ctx: click.Context, /, json_file: Path | None, progress: bool, **values: Any) -> None:
    """Measure any OpenAI-compatible server from its client's side.

    TTFT is the time from the request being written to the first non-empty content, reasoning or tool delta. Arrivals
    never wait for answers. With --kernels, in under a minute: how fast this machine multiplies and reads, and how near
    each operation of the model comes to that. Exit code: 0; 1 if it could not run, nothing was answered, or a check
    failed; 2 if the command line is wrong; 130 after Ctrl-C.
    """
    kernels, threads = values.pop("kernels"), values.pop("threads")
    if kernels:
        _refuse_other_options(ctx)
        _bench_kernels(values["model"] or DEFAULT_MODEL, threads, json_file, progress=progress)
        return
    if threads is not None:
        raise click.UsageError("--threads does nothing without --kernels: a server has threads of its own", ctx)
    _refuse_inert_options(ctx, values["workload"])
    options = BenchOptions(**values)
    try:
        validate(options)
    except BenchError as error:
        raise click.UsageError(str(error), ctx) from None
    try:
        shown = progress and sys.stderr.isatty()
        with Bar(sys.stderr, shown=shown, several=bool(options.against), rounds=options.rounds) as bar:
            report = run(options, bar)
        print_report(report, Console())
        if json_file is not None:
            write_report(report, json_file)
    except BenchError as error:
        raise click.ClickException(str(error)) from None
    ctx.exit(exit_code(report))


def _bench_kernels(model: str, threads: int | None, json_file: Path | None, *, progress: bool) -> None:
    shown = progress and sys.stderr.isatty()

    def draw(done: int, total: int) -> None:
        if shown:
            sys.stderr.write(f"\r\x1b[Kmeasuring {done}/{total}")
            sys.stderr.flush()

    try:
        report = run_kernels(model, threads, draw)
        if json_file is not None:
            write_kernel_report(report, json_file)
    except BenchError as error:
        raise click.ClickException(str(error)) from None
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
    print_kernel_report(report, Console())


def exit_code(report: Report) -> int:
    """What the command ends with."""
    if report.interrupted:
        return 130
    checks = (report.ledger or {}).values()
    return 0 if report.num_answered and all(check.passed for check in checks) else 1


def _refuse_other_options(ctx: click.Context) -> None:
    for param in ctx.command.params:
        given = param.name and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
        if given and param.name not in _FOR_KERNELS:
            raise click.UsageError(f"{param.opts[0]} does nothing with --kernels", ctx)


def _refuse_inert_options(ctx: click.Context, workload: str) -> None:
    for name, workloads in _ONLY_FOR.items():
        given = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if given and workload not in workloads:
            flag = "--" + name.replace("_", "-")
            raise click.UsageError(
                f"{flag} does nothing for --workload {workload}; it is for {', '.join(workloads)}", ctx
            )
