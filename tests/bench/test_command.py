"""The command: exit codes, refused flags, the table and the file, against a server in another thread's loop."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headstart.bench.command import Bar, bench
from headstart.bench.record import RequestRecord
from headstart.bench.report import read_report
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
        bar.round_begins("A", 1, 2)
        for _ in range(3):  # one more than was announced
            bar.request_ended(ended)
        bar.round_begins("B", 1, 0)
    first, *_, last, end = out.getvalue().split("\r\x1b[K")[1:]
    assert first.startswith("A round 2/3 [")
    assert first.endswith("0/2")
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
    assert result.exit_code != 0
    assert message in result.output
    assert "Traceback" not in result.output
