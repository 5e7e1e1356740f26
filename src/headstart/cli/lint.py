"""`headstart lint`: a file of requests in, what breaks the prefix cache out. Flags, streams and exit codes only."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from typing import IO

import click
from rich.console import Console

from headstart.cli.failure import show_error
from headstart.cli.lint_table import print_lint
from headstart.cli.progress import TerminalProgress
from headstart.config import DEFAULT_MODEL
from headstart.core.cost import CostModel, LinearCosts
from headstart.hub import ModelError, resolve
from headstart.hub.cache import cache_folder
from headstart.perf.cost_model import FittedCostModel
from headstart.perf.cost_store import CostStore
from headstart.prompt.lines import Line, read_lines
from headstart.prompt.lint import Linter, Prices, TokenCounter
from headstart.text import Tokenizer

_BREAKERS_FOUND = 1
_MAX_SHOWN = 20  # lines that cannot be read
_CHARACTERS_PER_TOKEN = 4
_DEFAULT_MS = 1.0
_AMOUNT = click.FloatRange(min=0, max=1e9)


@dataclass(frozen=True, slots=True)
class _Measures:
    """What tokens and milliseconds are counted by, and the same in words."""

    count: TokenCounter
    costs: CostModel
    words: str


@click.command()
@click.argument("file", type=click.File("rb"))
@click.option("--model", help=f"Whose tokenizer and measured costs. [default: {DEFAULT_MODEL}, or else an estimate]")
@click.option(
    "--ms-per-token", type=_AMOUNT, help=f"Prefill time of a token. [default: as calibrated, or {_DEFAULT_MS:g}]"
)
@click.option("--price-uncached", type=_AMOUNT, help="Money for a million prompt tokens; adds a column.")
@click.option("--price-cached", type=_AMOUNT, help="The same for cached ones. [default: 0]")
@click.option("--block-size", type=click.IntRange(1, 1024), default=16, show_default=True, help="Tokens a KV block.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def lint(
    file: IO[bytes],
    model: str | None,
    ms_per_token: float | None,
    price_uncached: float | None,
    price_cached: float | None,
    block_size: int,
    as_json: bool,
) -> None:
    """Find what breaks the prefix cache in FILE (- for stdin): chat requests, one a line, in the order they were sent.

    A line is the body of a request to /v1/chat/completions, or a line of OpenAI's batch API. What each request shares
    with an earlier one, but cannot take from the cache because something before it differs, is counted: in tokens, in
    milliseconds and in money. Lines that cannot be read are named, and the rest is judged.

    Exit code: 0 if nothing was found; 1 if something was; 2 if the command line is wrong or no line could be read.
    """
    prices = _prices(price_uncached, price_cached)
    _check(ms_per_token, "--ms-per-token")
    measures = _measures(model, ms_per_token)
    linter = Linter(measures.count, measures.costs, block_size=block_size, prices=prices)
    broken = _feed(linter, file)
    report = linter.report()
    name = click.format_filename(getattr(file, "name", "<stdin>"))
    if not report.requests:
        raise click.UsageError(f"{name} holds no request; write one JSON object with messages a line")
    if as_json:
        fields = report.as_dict() | {"measured_by": measures.words, "broken_lines": broken}
        click.echo(json.dumps(fields, ensure_ascii=False, indent=1))
    else:
        print_lint(report, name, measures.words, len(broken), Console())
    if report.breakers:
        sys.exit(_BREAKERS_FOUND)


def _check(value: float | None, flag: str) -> None:
    if value is not None and not math.isfinite(value):  # click's ranges let NaN through
        raise click.UsageError(f"{flag} is {value}; give a number")


def _prices(uncached: float | None, cached: float | None) -> Prices | None:
    _check(uncached, "--price-uncached")
    _check(cached, "--price-cached")
    if uncached is None:
        if cached is not None:
            raise click.UsageError("--price-cached has no effect without --price-uncached; give both")
        return None
    if (cached or 0.0) > uncached:
        raise click.UsageError(f"--price-cached ({cached:g}) is above --price-uncached ({uncached:g})")
    return Prices(uncached, cached or 0.0)


def _measures(model: str | None, ms_per_token: float | None) -> _Measures:
    """A model that is named must be there; the default one may be missing (no network), and tokens are estimated."""
    try:
        with TerminalProgress() as progress:
            files = resolve(model or DEFAULT_MODEL, progress=progress)
        tokenizer = Tokenizer.load(files)
    except ModelError as error:
        if model is not None:
            raise click.UsageError(" ".join(str(error).split())) from error
        tokens = f"tokens: estimated, one for {_CHARACTERS_PER_TOKEN} characters"
        return _Measures(TokenCounter(_estimate), *_costs("", ms_per_token, tokens))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, False)

    return _Measures(TokenCounter(encode), *_costs(files.name, ms_per_token, f"tokens: by {files.name}"))


def _estimate(text: str) -> range:
    return range(-(-len(text) // _CHARACTERS_PER_TOKEN))


def _costs(model: str, ms_per_token: float | None, tokens: str) -> tuple[CostModel, str]:
    if ms_per_token is None and model:
        known = CostStore(cache_folder() / "costs").latest(model)
        if known is not None:
            return FittedCostModel(known), f"{tokens}; ms: as measured on this machine"
    ms = _DEFAULT_MS if ms_per_token is None else ms_per_token
    hint = " (assumed: give --ms-per-token, or run headstart calibrate)" if ms_per_token is None else ""
    return LinearCosts(prefill_token=ms / 1000), f"{tokens}; ms: {ms:g} a token{hint}"


def _feed(linter: Linter, file: IO[bytes]) -> list[dict[str, object]]:
    """Returns the lines that cannot be read, after naming them."""
    broken: list[dict[str, object]] = []
    for line in read_lines(file):
        error = line.error or _added(linter, line)
        if error:
            broken.append({"line": line.number, "error": error})
            if len(broken) <= _MAX_SHOWN:
                show_error(f"line {line.number} {error}")
    if len(broken) > _MAX_SHOWN:
        show_error(f"{len(broken) - _MAX_SHOWN} more lines cannot be read (--json names them all)")
    return broken


def _added(linter: Linter, line: Line) -> str:
    assert line.prompt is not None
    try:
        linter.add(line.number, line.prompt)
    except ValueError as error:
        return f"cannot be tokenized: {error}"
    return ""
