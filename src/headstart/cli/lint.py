"""`headstart lint`: a file of requests in, what breaks the prefix cache out. Flags, streams and exit codes only."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import click
from rich.console import Console

from headstart.cli.failure import show_error
from headstart.cli.progress import TerminalProgress
from headstart.cli.prompts import ModelTemplate, load_prompt_maker
from headstart.config import DEFAULT_MODEL
from headstart.core.cost import LinearCosts
from headstart.hub import ModelError
from headstart.prompt.lines import read_requests
from headstart.prompt.lint import Linter, LintReport, Prices
from headstart.prompt.render import PromptMaker
from headstart.prompt.request import RequestError
from headstart.prompt.table import print_lint

BREAKERS_FOUND = 1
MAX_ERRORS_SHOWN = 50
_POSITIVE = click.FloatRange(min=0, max=1e6)


@click.command()
@click.argument("file", type=click.File("rb"))
@click.option(
    "--model", default=DEFAULT_MODEL, show_default=True, help="Whose template and tokenizer; no weights are read."
)
@click.option("--ms-per-token", type=_POSITIVE, default=1.0, show_default=True, help="Prefill time of a token.")
@click.option("--price-input", type=_POSITIVE, help="Money for a million prompt tokens; adds a column.")
@click.option("--price-cached", type=_POSITIVE, help="The same for cached ones. [default: 0]")
@click.option("--block-size", type=click.IntRange(1, 1024), default=16, show_default=True, help="Tokens a KV block.")
@click.option(
    "--cache-tokens",
    type=click.IntRange(1, 100_000_000),
    default=8_000_000,
    show_default=True,
    help="Size of the simulated cache.",
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path, allow_dash=True), help="Write the report there; - prints it."
)
def lint(
    file: IO[bytes],
    model: str,
    ms_per_token: float,
    price_input: float | None,
    price_cached: float | None,
    block_size: int,
    cache_tokens: int,
    json_file: Path | None,
) -> None:
    """Find what breaks the prefix cache in FILE (- for stdin): chat requests, a line each, as they were sent.

    A line is the body of a request as OpenAI's API has it, or a line of its batch API. The file is replayed into a
    cache of --cache-tokens; what would have been hits but for one value, order or edit is counted, and told with what
    to move where. Lines that cannot be read are named and left out. Exit code: 0 if nothing was found; 1 if something
    was; 2 if the command line is wrong or no line could be read.
    """
    prices = _prices(price_input, price_cached)
    linter = Linter(LinearCosts(prefill_token=ms_per_token / 1000), block_size=block_size, cache_tokens=cache_tokens)
    with _model_errors(), TerminalProgress() as progress:
        maker, template = load_prompt_maker(model, progress)
    _feed(linter, file, maker)
    report = linter.report()
    if not report.num_requests:
        raise click.UsageError(f"{file.name} holds no request; write one JSON object with messages a line")
    _write(report, file.name, prices, json_file, template)
    if report.breakers:
        sys.exit(BREAKERS_FOUND)


@contextmanager
def _model_errors() -> Iterator[None]:
    """As a usage error: exit code 1 would say that something was found."""
    try:
        yield
    except ModelError as error:
        raise click.UsageError(" ".join(str(error).split())) from error


def _prices(given: float | None, cached: float | None) -> Prices | None:
    if given is None:
        if cached is not None:
            raise click.UsageError("--price-cached has no effect without --price-input; give both")
        return None
    if (cached or 0.0) > given:
        raise click.UsageError(f"--price-cached ({cached:g}) is above --price-input ({given:g})")
    return Prices(given, cached or 0.0)


def _feed(linter: Linter, file: IO[bytes], maker: PromptMaker) -> None:
    num_errors = 0
    for line in read_requests(file):
        error = line.error
        if line.request is not None:
            try:
                linter.feed(maker.make(line.request), line.number)
            except RequestError as refused:
                error = f"cannot be rendered: {refused}"
        if error:
            num_errors += 1
            if num_errors <= MAX_ERRORS_SHOWN:
                show_error(f"line {line.number} {error}")
    if num_errors > MAX_ERRORS_SHOWN:
        show_error(f"{num_errors - MAX_ERRORS_SHOWN} more lines cannot be read")


def _write(
    report: LintReport, name: str, prices: Prices | None, json_file: Path | None, template: ModelTemplate
) -> None:
    text = json.dumps(report.as_dict(prices) | {"notes": template.notes()}, ensure_ascii=False, indent=1)
    if json_file is not None and str(json_file) == "-":
        click.echo(text)
        return
    if json_file is not None:
        try:
            json_file.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise click.UsageError(f"cannot write {json_file}: {error.strerror}") from None
    console = Console()
    print_lint(report, name, prices, console)
    for note in template.notes():
        console.print(f"[yellow]Note:[/] {note}", highlight=False)
