"""`headstart serve` and `headstart chat` as a user runs them: real processes, a real (tiny) model, real HTTP."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from headstart import launch
from headstart.cli.client import Client
from headstart.cli.group import group
from headstart.cli.local_server import free_port
from headstart.hub import ModelError
from tests.fixtures.stories import make_stories_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stories_folder(tmp_path_factory.mktemp("models") / "stories")


class Running:
    """A server process; `lines` are what it wrote to stderr up to and with the ready line."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headstart", "serve", *arguments, "--host", "127.0.0.1", "--port", "0"],
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("HEADSTART_")},
        )
        assert self.process.stderr is not None
        self.lines: list[str] = []
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("ready after"):
                break
        assert any(line.startswith("ready after") for line in self.lines), self.lines
        self.url = self.lines[-1].split()[-1]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Exit code, and what was still written."""
        self.process.send_signal(number)
        _, rest = self.process.communicate(timeout=30)
        return self.process.returncode, rest


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    server = Running(str(folder), "--served-model-name", "tiny", "--max-model-len", "200", "--kv-cache-memory", "8MiB")
    yield server
    server.stop()


def test_it_says_what_was_settled_in_lines_for_a_narrow_terminal(running: Running) -> None:
    name, *settled, ready = running.lines[running.lines.index("tiny") :]
    assert name == "tiny"
    assert settled[0].startswith("  llama, ")
    assert all(line.startswith("  ") and len(line) < 80 for line in settled)
    text = " ".join(line.strip() for line in settled)
    for part in ("float32", "context 200", "blocks of 16", "prefix cache on", "srpf", "depth 1", "attention horizon"):
        assert part in text
    assert re.fullmatch(r"ready after \d+\.\d s: http://127\.0\.0\.1:\d+", ready)


def test_ready_means_an_answer_at_once(running: Running) -> None:
    client = Client(running.url)
    assert client.is_ready()
    assert client.models() == ["tiny"]
    answer = client.chat("tiny", [{"role": "user", "content": "Once upon a time"}], max_tokens=8, temperature=0)
    assert answer.text
    assert answer.num_output_tokens == 8
    assert {"queue", "prefill", "deliver"} <= {name for name, _ in answer.timing}
    assert sum(seconds for _, seconds in answer.timing) <= answer.ttft


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_when_told_to_and_leaves_nothing(folder: Path, number: signal.Signals) -> None:
    server = Running(str(folder), "--kv-cache-memory", "8MiB")
    assert server.stop(number) == (0, "")
    assert not Client(server.url).is_ready()


def test_a_second_ctrl_c_ends_running_streams_at_once(folder: Path) -> None:
    """One place and 64 choices, one after the other: the stream outlasts the grace."""
    server = Running(str(folder), "--kv-cache-memory", "8MiB", "--max-num-seqs", "1", "--max-n", "64")
    body = {"prompt": "Once", "n": 64, "max_tokens": 500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGINT)
        assert server.process.stderr is not None
        told = server.process.stderr.readline()
        assert told == "stopping: 1 request may finish within 20 s; Ctrl-C again ends them now\n"
        server.process.send_signal(signal.SIGINT)
        rest = "\n".join(lines)
    assert "[DONE]" not in rest
    assert '"code":"shutting_down"' in rest
    assert server.process.communicate(timeout=30)[1] == ""
    assert server.process.returncode == 0


def test_chat_answers_piped_lines_one_by_one(running: Running) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "headstart", "chat", "--url", running.url, "--max-tokens", "6", "--temperature", "0"],
        input="Once upon a time there was a little girl\nAnd then what did she do\n/reset\nThe end\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert len(result.stdout.splitlines()) >= 3
    cached = [int(number) for number in re.findall(r"(\d+) of \d+ prompt tokens cached", result.stderr)]
    assert len(cached) == 3
    assert cached[1] > 0, "the second turn's prompt begins like the first"


def test_chat_can_bring_its_own_server(folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "headstart", "chat", str(folder), "--max-tokens", "4"],
        input="Once upon a time\n",
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert result.stdout.strip()
    assert result.stderr.startswith("TTFT ")


def test_a_chat_that_is_ended_ends_its_server_too(folder: Path) -> None:
    chat = subprocess.Popen(
        [sys.executable, "-m", "headstart", "chat", str(folder), "--max-tokens", "4"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write("Once upon a time\n")
        chat.stdin.flush()
        assert chat.stdout.read(1)  # an answer: the server runs, and chat waits for the next line
        (server,) = children_of(chat.pid)
        chat.terminate()
        assert chat.wait(60) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{server}").exists()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_chat_without_a_server_to_talk_to() -> None:
    result = CliRunner().invoke(group, ["chat", "--url", "http://127.0.0.1:9"], input="hi\n")
    assert result.exit_code == 1
    assert re.fullmatch(r"error: cannot reach http://127\.0\.0\.1:9: .*\n", result.stderr)


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(group, ["serve", *arguments, "--port", "0"])


def one_error_line(result: Result) -> str:
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_a_missing_model(tmp_path: Path) -> None:
    assert str(tmp_path / "absent") in one_error_line(serve(str(tmp_path / "absent")))


def test_a_damaged_model(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    assert "broken.gguf" in one_error_line(serve(str(tmp_path / "broken.gguf")))


def test_weights_that_end_early_stop_the_start(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    weights = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    result = subprocess.run(
        [sys.executable, "-m", "headstart", "serve", str(tmp_path), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "model.safetensors" in line


def test_a_missing_tensor_is_told_without_starting_an_engine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    weights = (folder / "model.safetensors").read_bytes()
    renamed = weights.replace(b"model.layers.3.mlp.up_proj.weight", b"model.layers.3.mlp.uq_proj.weight")
    assert renamed != weights
    (tmp_path / "model.safetensors").write_bytes(renamed)
    monkeypatch.setattr(launch, "launch_engine", lambda *_, **__: pytest.fail("an engine was started"))
    assert "tensor model.layers.3.mlp.up_proj.weight is missing" in one_error_line(serve(str(tmp_path)))


def can_connect(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_nothing_listens_before_the_model_is_checked_but_the_address_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    port, seen = free_port(), []

    def check_a_while(*_: object) -> None:
        seen.append(can_connect(port))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        raise ModelError("this model is damaged")

    monkeypatch.setattr(launch, "load_model", check_a_while)
    result = CliRunner().invoke(group, ["serve", "--port", str(port)])
    assert "this model is damaged" in one_error_line(result)
    assert seen == [False]


def test_an_address_that_another_took_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, load = free_port(), launch.load_model
    with contextlib.ExitStack() as stack:

        def be_overtaken(*arguments: Any) -> launch.LoadedModel:
            other = stack.enter_context(socket.socket())
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", port))
            other.listen()
            return load(*arguments)

        monkeypatch.setattr(launch, "load_model", be_overtaken)
        result = CliRunner().invoke(group, ["serve", str(folder), "--port", str(port)])
    assert f"port {port}" in one_error_line(result)


def test_an_address_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = CliRunner().invoke(group, ["serve", "--port", str(port)])
    assert f"port {port}" in one_error_line(result)


def test_a_mistyped_flag_gets_the_nearest_one() -> None:
    result = serve("--max-num-seq", "3")
    assert result.exit_code == 2
    assert "--max-num-seqs" in result.stderr


def test_a_mistyped_choice_lists_the_choices() -> None:
    result = serve("--policy", "sjf")
    assert result.exit_code == 2
    assert "'fcfs', 'srpf'" in result.stderr


def test_a_mistyped_key_in_the_file_gets_the_nearest_one(tmp_path: Path) -> None:
    file = tmp_path / "h.toml"
    file.write_text("[scheduler]\nmax_num_seq = 3\n")
    assert "did you mean max_num_seqs?" in one_error_line(serve("--config", str(file)))


def test_flags_that_cannot_work_are_a_usage_error() -> None:
    """Other sources of the same mistake are not: nothing is wrong with the command line then."""
    for flags, told in (
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["--policy", "fcfs", "--aging-ms", "1"], "aging_ms has no effect"),
        (["--kv-cache-memory", "2 gigs"], "2 gigs"),
    ):
        result = serve(*flags)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert told in result.stderr
    for faultless in ([], ["--max-n", "3"]):
        result = CliRunner(env={"HEADSTART_MAX_NUM_SEQS": "0"}).invoke(group, ["serve", *faultless, "--port", "0"])
        assert "max_num_seqs is 0" in one_error_line(result)


def test_the_help_is_grouped_and_shows_defaults() -> None:
    text = CliRunner().invoke(group, ["serve", "--help"]).output
    places = [text.index(f"\n{title}:\n") for title in ("Model", "KV cache", "Scheduler", "Server", "Options")]
    assert places == sorted(places)
    assert "[default: 8000]" in text
