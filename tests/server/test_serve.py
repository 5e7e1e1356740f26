"""A server process and its signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

SOURCES = Path(__file__).resolve().parents[2] / "src"
PROGRAM = """
import sys
sys.path.insert(0, {sources!r})
import uvloop
from headstart.config import ServerConfig
from headstart.server import listen, serve

async def app(scope, receive, send):
    await send({{"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}})
    await send({{"type": "http.response.body", "body": b"ok"}})

async def main():
    try:
        await serve(app, listen(ServerConfig(port=0)), on_listening=lambda url: print(url, flush=True))
    finally:
        print("engine shut down", flush=True)

uvloop.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_serving_and_leaves_the_rest_to_the_caller(number: signal.Signals) -> None:
    command = [sys.executable, "-c", PROGRAM.format(sources=str(SOURCES))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert httpx.get(url, trust_env=False).text == "ok"
            process.send_signal(number)
            output, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert output == "engine shut down\n"
    assert process.returncode == 0
    assert "Traceback" not in errors
