"""The command: exit codes, refused flags, the table and the file, against a server in another thread's loop."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from headstart.bench.command import Bar, bench
from headstart.bench.record import RequestRecord
from headstart.bench.report import read_report
from headstart.bench.stats import SLO, summarise
from headstart.bench.table import print_report
from tests.bench.scripted import ScriptedServer, scripted_server


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    """The command makes its own event loop, so the server needs another."""
    ready = threading.Event()
    found: list[ScriptedServer] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with scripted_server() as scripted:
            found.append(scripted)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def call(*args: str) -> Result:
    return CliRunner().invoke(bench, args)


def test_a_run_prints_a_table_and_writes_the_file(server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = call("--url", server.url, "--lengths", "30,50", "-n", "2", "--slo-ttft", "60000", "--json", str(path))
    assert result.exit_code == 0, result.output
    for text in ("idle 30", "idle 50", "TTFT", "largest gap", "SLO met", "100.0%", "prefill 50 tokens per s"):
        assert text in result.output
    assert read_report(path).num_answered == 4


def test_the_bar_counts_and_leaves_nothing_behind() -> None:
    out = io.StringIO()
    ended = RequestRecord(target="A", round=0, group="g", index=0)
    with Bar(out, shown=True, several=True, rounds=3) as bar:
        bar.INTERVAL_S = 0.0  # type: ignore[misc]
        bar.round_begins("A", 1, 2)
        for _ in range(3):  # one more than was announced
            bar.request_ended(ended)
        bar.round_begins("B", 1, 0)
    first, *_, full, last, end = out.getvalue().split("\r\x1b[K")[1:]
    assert first.startswith("A round 2/3 ")
    assert first.endswith("0/2")
    assert "━" not in first
    assert "━" * Bar.WIDTH in full
    assert last.startswith("B round 2/3")
    assert end == ""

    with Bar(out := io.StringIO(), shown=False, several=False, rounds=1) as bar:
        bar.preparing("A")
        bar.round_begins("A", 0, 2)
    assert out.getvalue() == ""


def test_two_servers(server: ScriptedServer) -> None:
    result = call("--url", server.url, "--against", server.url, "--lengths", "30", "-n", "1", "--rounds", "2")
    assert result.exit_code == 0, result.output
    assert "A / B" in result.output


def record(group: str, ttft: float, ledger: dict[str, float]) -> RequestRecord:
    return RequestRecord(
        target="server", round=0, group=group, index=0, status="ok", sent_s=0.0, end_s=1.0, ttft_ms=ttft, ledger=ledger
    )


def test_the_ledger_table_has_a_row_for_each_part_that_took_time(server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert call("--url", server.url, "--lengths", "30", "-n", "1", "--json", str(path)).exit_code == 0
    ledgers = {"long": {"queue": 0.0, "prefill": 800.0}, "short": {"queue": 12.5, "prefill": 40.0, "load": 0.001}}
    groups = [summarise([record(name, 1.0, ledger)], SLO()) for name, ledger in ledgers.items()]
    out = io.StringIO()
    print_report(msgspec.structs.replace(read_report(path), groups=groups), Console(file=out, width=80))
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert ["queue", "0.00", "12.5"] in rows
    assert ["prefill", "800", "40.0"] in rows
    assert ["sum", "800", "52.5"] in rows
    assert "load" not in [row[0] for row in rows if row]


def test_a_failed_check_is_exit_code_1(server: ScriptedServer) -> None:
    result = call("--url", server.url, "--lengths", "30", "-n", "1", "--check-ledger")
    assert result.exit_code == 1
    assert "no answer carried a ledger" in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--url", "ftp://x"), "no HTTP address"),
        (("--workload", "trace"), "needs --file"),
        (("--workload", "idle", "--rate", "5"), "--rate does nothing for --workload idle"),
        (("--workload", "poisson", "--prompt-tokens", "many"), "write a number"),
        (("--lengths", "1,x"), "no list of numbers"),
        (("--roundss", "5"), "--rounds"),
        (("--rounds", "0"), "at least 1"),
    ],
)
def test_what_is_refused_names_what_to_do(args: tuple[str, ...], message: str) -> None:
    result = call(*args)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
