"""`headstart lint`: its exit codes, its streams, and what becomes of lines that cannot be read."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from headstart.cli.lint import lint
from headstart.cli.lint_table import print_lint
from headstart.core.cost import LinearCosts
from headstart.perf.cost_store import CostKey, CostStore
from headstart.prompt import ChatPrompt, Part, read_request
from headstart.prompt.lines import MAX_LINE_BYTES
from headstart.prompt.lint import Linter, TokenCounter
from tests.fixtures.stories import make_stories_folder
from tests.perf.test_cost_model import TRUE
from tests.prompt.planted import QUESTIONS, RULES, ask

DATED = [ask(f"It is 12:0{minute}. {RULES}", QUESTIONS[minute]) for minute in range(4)]
STEADY = [ask(RULES, question) for question in QUESTIONS[:4]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, and a cache folder in which nothing was measured."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    return make_stories_folder(tmp_path / "stories")


def lines(*requests: Any) -> bytes:
    return b"".join(each if isinstance(each, bytes) else json.dumps(each).encode() + b"\n" for each in requests)


def call(folder: Path, log: bytes, *options: str) -> Result:
    path = folder.parent / "log.jsonl"
    path.write_bytes(log)
    return CliRunner().invoke(lint, [str(path), "--model", str(folder), *options])


def report_of(result: Result) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_a_breaker_is_exit_code_1_and_says_what_where_and_what_to_do(folder: Path) -> None:
    result = call(folder, lines(*DATED))
    assert result.exit_code == 1, result.output
    for text in ("timestamp", "message 0 (system)", "was “12:00”, is “12:01”", "move the timestamp"):
        assert text in result.stdout, text
    assert "tokens: by " in result.stdout
    assert result.stderr == ""


def test_nothing_found_is_exit_code_0(folder: Path) -> None:
    result = call(folder, lines(*STEADY))
    assert result.exit_code == 0, result.output
    assert "No cache breaker found" in result.stdout
    assert report_of(call(folder, lines(*STEADY), "--json"))["breakers"] == []


@pytest.mark.parametrize("log", [b"", b"\n\n", b"{}\n", b"not JSON\n"])
def test_a_file_without_requests_is_exit_code_2(folder: Path, log: bytes) -> None:
    result = call(folder, log, "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "holds no request; write one JSON object with messages a line" in result.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--price-cached", "1"), "give both"),
        (("--price-cached", "2", "--price-uncached", "1"), "is above --price-uncached"),
        (("--price-uncached", "nan"), "give a number"),
        (("--ms-per-token", "nan"), "give a number"),
        (("--ms-per-token", "-1"), "not in the range"),
        (("--block-size", "0"), "not in the range"),
        (("--model", "none.gguf"), "none.gguf"),
    ],
)
def test_options_that_cannot_work_are_refused(folder: Path, options: tuple[str, ...], text: str) -> None:
    result = call(folder, lines(*DATED), *options)
    assert result.exit_code == 2
    assert text in result.stderr


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(lint, [str(tmp_path / "none.jsonl")])
    assert result.exit_code == 2
    assert "No such file" in result.stderr


def test_stdin(folder: Path) -> None:
    result = CliRunner().invoke(lint, ["-", "--model", str(folder), "--json"], input=lines(*DATED))
    assert result.exit_code == 1
    assert report_of(result)["requests"] == len(DATED)


def test_json_says_it_all(folder: Path) -> None:
    report = report_of(call(folder, lines(*DATED), "--json", "--ms-per-token", "2"))
    [breaker] = report["breakers"]
    assert (breaker["kind"], breaker["where"], breaker["characters"]) == ("timestamp", "message 0 (system)", [6, 11])
    assert (breaker["after"], breaker["old"], breaker["new"]) == ("It is ", "12:00", "12:01")
    assert (breaker["lines"], breaker["requests"]) == ([1, 2], 3)
    assert 0 < breaker["lost_tokens"] == report["lost_tokens"] < report["prompt_tokens"]
    assert breaker["lost_ms"] == report["lost_ms"] == 2 * report["lost_tokens"]
    assert (report["lost_money"], report["broken_lines"]) == (None, [])
    assert "ms: 2 a token" in report["measured_by"]


def test_prices(folder: Path) -> None:
    prices = ("--price-uncached", "3", "--price-cached", "1")
    report = report_of(call(folder, lines(*DATED), "--json", *prices))
    assert report["lost_money"] == pytest.approx(report["lost_tokens"] * 2e-6)
    assert sum(breaker["lost_money"] for breaker in report["breakers"]) == pytest.approx(report["lost_money"])
    assert "money" in call(folder, lines(*DATED), *prices).stdout
    assert "money" not in call(folder, lines(*DATED)).stdout


def test_lines_that_cannot_be_read_are_named_and_the_rest_is_judged(folder: Path) -> None:
    broken = {
        2: (b"{\n", "is no JSON"),
        3: (b"\xff\n", "is no JSON"),
        4: (b"[1]\n", "is no JSON object"),
        5: (lines({"messages": []}), "has no messages"),
        6: (lines(ask(RULES, "\ud800")), "message 1 (user): holds half of a surrogate pair (\\ud800)"),
        7: (lines(ask(RULES, "Hi", cache_salt="\udfff")), "a field beside them: holds half of a surrogate pair"),
        8: (b"[" * 200_000 + b"\n", "is nested too deeply"),
        9: (b'{"messages": ' + b"1" * 5_000 + b"}\n", "is no JSON"),
    }
    log = lines(DATED[0], *(data for data, _ in broken.values()), *DATED[1:])
    result = call(folder, log, "--json")
    assert result.exit_code == 1
    for number, (_, text) in broken.items():
        assert f"line {number} {text}" in result.stderr
    report, alone = report_of(result), report_of(call(folder, lines(*DATED), "--json"))
    assert [each["line"] for each in report["broken_lines"]] == list(broken)
    assert report["breakers"][0]["lines"] == [1, 10]
    report["breakers"][0]["lines"], report["broken_lines"] = [1, 2], []
    assert report == alone
    assert "8 lines are left out" in call(folder, log).stdout


def test_of_many_broken_lines_some_are_shown_and_all_are_in_the_json(folder: Path) -> None:
    result = call(folder, b"{\n" * 50 + lines(*STEADY), "--json")
    assert result.exit_code == 0
    assert len(report_of(result)["broken_lines"]) == 50
    assert "30 more lines cannot be read" in result.stderr
    assert "line 21 " not in result.stderr


def test_a_line_that_is_too_long_is_named_and_the_rest_is_judged(folder: Path) -> None:
    log = lines(DATED[0], b'"' + b"x" * (2 * MAX_LINE_BYTES) + b'"\n', *DATED[1:])
    result = call(folder, log, "--json")
    assert result.exit_code == 1
    assert "line 2 is longer than 64 MiB" in result.stderr
    assert report_of(result)["requests"] == len(DATED)


def test_a_request_that_cannot_be_tokenized_leaves_nothing_half_counted() -> None:
    def encode(text: str) -> bytes:
        return text.encode()

    def judge(*prompts: ChatPrompt) -> dict[str, object]:
        linter = Linter(TokenCounter(encode), LinearCosts())
        for number, prompt in enumerate(prompts, 1):
            if any("\ud800" in part.text for part in prompt.parts):
                with pytest.raises(ValueError, match="surrogates"):
                    linter.add(number, prompt)
            else:
                linter.add(number, prompt)
        return linter.report().as_dict()

    good = [read_request(request) for request in DATED]
    bad = ChatPrompt((*good[0].parts, Part("user", 2, "\ud800")), salt="another")
    assert judge(*good, bad) == judge(*good)


def test_what_a_request_says_does_nothing_to_the_terminal(folder: Path) -> None:
    role = "[/bold]\x1b[2J"
    log = [{"messages": [{"role": role, "content": f"[red]\x1b[31m 12:0{i} {RULES}"}]} for i in range(4)]
    result = call(folder, lines(*log))
    assert result.exit_code == 1, result.exception
    assert "\x1b[2J" not in result.stdout
    assert "\x1b[31m" not in result.stdout
    assert "message 0 ([/bold]\\x1b[2J)" in "".join(result.stdout.splitlines())


def test_the_table_fits_a_narrow_terminal() -> None:
    linter = Linter(TokenCounter(str.split), LinearCosts(prefill_token=0.002))
    for number, request in enumerate(DATED, 1):
        linter.add(number, read_request(request))
    out = io.StringIO()
    print_lint(linter.report(), "log.jsonl", "words", 1, Console(file=out, width=80))
    printed = out.getvalue()
    assert max(map(len, printed.splitlines())) <= 80
    assert "1 line is left out" in printed
    row = next(line for line in printed.splitlines() if line.strip().startswith("1 ") and "timestamp" in line)
    assert "message 0 (system)" in row


def test_costs_are_those_measured_last_for_the_model(folder: Path) -> None:
    assumed = call(folder, lines(*DATED), "--json")
    assert "assumed" in report_of(assumed)["measured_by"]
    key = CostKey(f"{folder} 0123", "cpu", "float32", 16, 2)
    assert CostStore(folder.parent / "cache" / "costs").save(key, TRUE)
    measured = report_of(call(folder, lines(*DATED), "--json"))
    assert measured["measured_by"].endswith("as measured on this machine")
    assert measured["lost_ms"] != report_of(assumed)["lost_ms"]


def test_without_the_default_model_tokens_are_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "file" / "cache"))  # nothing can be fetched into it
    path = tmp_path / "log.jsonl"
    path.write_bytes(lines(*DATED))
    result = CliRunner().invoke(lint, [str(path), "--json"])
    assert result.exit_code == 1, result.output
    assert "tokens: estimated, one for 4 characters" in report_of(result)["measured_by"]
