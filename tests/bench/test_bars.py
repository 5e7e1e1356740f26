"""`benchmarks/bars.py` as it is called: what passes, what fails, and what it ends with."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.bench.scripted import Call, answer, scripted_server

ROOT = Path(__file__).resolve().parents[2]
COMPUTE_S = 0.1  # what a prompt takes that is not cached


def prefix_cache(*, works: bool) -> Callable[[Call], Awaitable[None]]:
    """A server for which a system message is quick the second time, or every time alike."""
    seen: set[str] = set()

    async def script(call: Call) -> None:
        system = call.body["messages"][0]["content"]
        if not works or system not in seen:
            await asyncio.sleep(COMPUTE_S)
        seen.add(system)
        await answer(call)

    return script


async def bars(*arguments: str) -> tuple[int, str]:
    """Exit code, and what was printed on either stream."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "benchmarks" / "bars.py"), *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    printed, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, printed.decode()


@pytest.mark.parametrize("works", [True, False])
async def test_a_missed_bar_is_exit_code_1(works: bool, tmp_path: Path) -> None:
    path = tmp_path / "bars.json"
    async with scripted_server(prefix_cache(works=works)) as scripted:
        sizes = ("--short-tokens", "16", "--prefix-tokens", "40", "--rounds", "1")
        code, printed = await bars("--url", scripted.url, "--only", "prefix", *sizes, "--json", str(path))
    assert code == (0 if works else 1), printed
    assert f"{'PASS' if works else 'FAIL'}  prefix: warm over cold" in printed
    written = json.loads(path.read_text())
    assert written["passed"] is works
    assert written["machine"]["cores"] >= 1
    assert all(bar["passed"] for bar in written["bars"] if "over cold" not in bar["name"])


async def test_the_worst_short_prompt_is_shown_beside_the_median() -> None:
    release = asyncio.Event()

    async def script(call: Call) -> None:
        """Short prompts are answered at once; the long one when a short one came after it."""
        if call.num_words > 100:
            await release.wait()
        elif any(earlier.num_words > 100 for earlier in scripted.streams):
            release.set()
        await answer(call)

    async with scripted_server(script) as scripted:
        code, printed = await bars(
            "--url", scripted.url, "--only", "hol", "--short-tokens", "16", "--long-tokens", "200"
        )
    assert code in (0, 1), printed  # which of them depends on how steady this machine is
    assert "hol: short prompt over idle, median (worst " in printed
    assert "PASS  hol: requests that failed" in printed


async def test_what_was_not_measured_is_a_miss() -> None:
    """A server without ledgers: nothing can be compared."""
    async with scripted_server() as scripted:
        code, printed = await bars("--url", scripted.url, "--only", "ledger", "--requests", "3", "--rate", "1000")
    assert code == 1
    assert "FAIL  ledger: requests compared: 0 (must be >= 3)" in printed


async def test_no_server_is_one_line() -> None:
    code, printed = await bars("--url", "http://127.0.0.1:9", "--only", "prefix")
    assert code == 1
    assert "error: " in printed
    assert "Traceback" not in printed
