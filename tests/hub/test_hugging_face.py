"""Models by hub id: the real `huggingface_hub` client, in a fresh process, against a small hub on loopback."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import headstart

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"not wanted",
    "original/model.safetensors": b"not wanted",
    "model-q8.gguf": b"GGUF....",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """One public repository, `org/name`, and a gated one, `org/gated`."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        type(self).asked.append(path)
        prefix = f"/org/name/resolve/{COMMIT}/"
        if path.startswith("/api/models/org/name/revision/"):
            siblings = [{"rfilename": name} for name in REPOSITORY]
            self.answer(json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith("/api/models/org/name/tree/"):
            entries = [
                {"type": "file", "path": name, "oid": hashlib.sha1(body).hexdigest(), "size": len(body)}
                for name, body in REPOSITORY.items()
            ]
            self.answer(json.dumps(entries).encode())
        elif path.startswith(prefix) and path.removeprefix(prefix) in REPOSITORY:
            self.answer(REPOSITORY[path.removeprefix(prefix)])
        elif path.startswith("/api/models/org/gated"):
            self.answer(b"{}", 403, {"X-Error-Code": "GatedRepo"})
        else:
            self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    def answer(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """The hub's URL, and the paths that it was asked for."""
    handler = type("OneHub", (Hub,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", handler.asked
    server.shutdown()
    thread.join()
    server.server_close()


CODE = (
    "import sys; from headstart.hub import ModelError, resolve\n"
    "try: print(*sorted(path.name for path in resolve(sys.argv[1]).root.iterdir()))\n"
    "except ModelError as error: sys.exit(f'ModelError: {error}')"
)


def resolve_in_a_process(model: str, endpoint: str, home: Path) -> tuple[str, str]:
    """Standard output and error of resolving `model` with that hub and an own cache."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    environment |= {"PYTHONPATH": str(Path(headstart.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", CODE, model], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    return done.stdout.strip(), done.stderr.strip()


def test_only_what_is_needed_is_fetched_and_then_kept(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    url, asked = hub
    out, err = resolve_in_a_process("org/name", url, tmp_path)
    assert out == "config.json model.safetensors tokenizer.json", err
    assert not any("pytorch_model" in path or "original" in path or path.endswith(".gguf") for path in asked)
    out, err = resolve_in_a_process("org/name", "http://127.0.0.1:9", tmp_path)  # the hub is gone, the cache is not
    assert out == "config.json model.safetensors tokenizer.json", err


def test_one_gguf_file_of_a_repository(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    out, err = resolve_in_a_process("org/name/model-q8.gguf", hub[0], tmp_path)
    assert out == "model-q8.gguf", err
    _, err = resolve_in_a_process("org/name/absent.gguf", hub[0], tmp_path)
    assert err.splitlines()[-1] == "ModelError: the hub's org/name has no file absent.gguf"


@pytest.mark.parametrize(
    ("model", "message"),
    [("org/gated", "org/gated is gated: accept its terms"), ("org/nothing", "neither a file here nor a repository")],
)
def test_what_the_hub_refuses_is_one_clear_line(
    hub: tuple[str, list[str]], tmp_path: Path, model: str, message: str
) -> None:
    out, err = resolve_in_a_process(model, hub[0], tmp_path)
    assert not out
    assert "Traceback" not in err
    assert message in err.splitlines()[-1]


def test_without_the_hub_the_message_says_what_to_do(tmp_path: Path) -> None:
    out, err = resolve_in_a_process("org/name", "http://127.0.0.1:9", tmp_path)
    assert not out
    assert "the hub cannot be reached" in err.splitlines()[-1]
    assert "name a local folder or .gguf file" in err.splitlines()[-1]
