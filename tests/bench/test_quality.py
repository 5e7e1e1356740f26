"""`benchmarks/quality.py`: its arithmetic, and a run on stories260K."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks._quality_stats import Scores, divergence, quality
from tests.fixtures.stories import make_stories_folder, shared_data

ROOT = Path(__file__).resolve().parents[2]


def scores(logits: list[list[float]], reference: list[list[float]], came: list[int]) -> tuple[Scores, Scores]:
    this, base = (torch.tensor(rows).log_softmax(1) for rows in (logits, reference))
    found, against = Scores(), Scores()
    found.add(this, base, torch.tensor(came))
    against.add(base, base, torch.tensor(came))
    return found, against


def test_a_reference_costs_nothing_against_itself() -> None:
    _, base = scores([[0.0, 1.0], [0.5, 0.0]], [[0.0, 1.0], [0.5, 0.0]], [0, 1])
    found = quality(base, base)
    assert (found.change, found.change_error, found.divergence, found.agreement) == (0, 0, 0, 1)


def test_perplexity_of_certainty_and_of_a_coin() -> None:
    coin, sure = scores([[0.0, 0.0]] * 4, [[50.0, 0.0]] * 4, [0] * 4)
    found = quality(coin, sure)
    assert found.perplexity == pytest.approx(2)
    assert found.change == pytest.approx(1)
    assert found.divergence == pytest.approx(math.log(2))
    assert found.change_error == pytest.approx(0, abs=1e-6)
    assert quality(sure, sure).perplexity == pytest.approx(1)


def test_agreement_counts_likeliest_tokens() -> None:
    found, base = scores([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0]] * 4, [0, 0, 0, 0])
    assert quality(found, base).agreement == 0.5


def test_divergence_is_that_of_its_definition() -> None:
    p, q = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.5, 0.25, 0.25]])
    expected = 0.7 * math.log(0.7 / 0.5) + 0.2 * math.log(0.2 / 0.25) + 0.1 * math.log(0.1 / 0.25)
    assert float(divergence(p.log(), q.log())) == pytest.approx(expected, rel=1e-6)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "quality.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_every_format_on_a_small_model(tmp_path: Path) -> None:
    model, text, written = make_stories_folder(tmp_path / "stories"), tmp_path / "text.txt", tmp_path / "found.json"
    text.write_text("Once upon a time there was a little girl named Lily. She loved to play in the park. " * 40)
    sizes = ("--tokens", "192", "--context", "96", "--chunk", "40", "--threads", "1")
    ended = run("--model", str(model), "--text", str(text), *sizes, "--json", str(written))
    assert ended.returncode == 0, ended.stderr
    assert "PASS  text: perplexity of the default format" in ended.stdout
    found = json.loads(written.read_text())["results"]["text"]
    assert list(found)[:6] == ["float32", "auto", "bfloat16", "int8", "int4", "fp8"]
    assert list(found)[6:] == [f"auto, KV {name}" for name in ("float16", "bfloat16", "int8", "fp8")]
    assert {each["predictions"] for each in found.values()} == {2 * 95}
    assert found["float32"]["divergence"] == 0
    assert found["auto"] == found["int8"]  # what the default is for a float checkpoint
    assert 0 < found["int8"]["divergence"] < found["int4"]["divergence"] < 0.5


def test_kv_formats_alone(tmp_path: Path) -> None:
    model, text, written = make_stories_folder(tmp_path / "stories"), tmp_path / "text.txt", tmp_path / "found.json"
    text.write_text("Once upon a time there was a little girl named Lily. She loved to play in the park. " * 40)
    sizes = ("--tokens", "192", "--context", "96", "--chunk", "40", "--threads", "1", "--weights", "")
    ended = run("--model", str(model), "--text", str(text), *sizes, "--kv-weights", "float32", "--json", str(written))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(written.read_text())["results"]["text"]
    assert list(found) == ["float32", *(f"float32, KV {name}" for name in ("float16", "bfloat16", "int8", "fp8"))]
    errors = [found[f"float32, KV {name}"]["divergence"] for name in ("float16", "int8", "fp8")]
    assert errors == sorted(errors)


def test_a_text_that_is_too_short_is_one_line(tmp_path: Path) -> None:
    model, text = make_stories_folder(tmp_path / "stories"), shared_data("README.md")
    ended = run("--model", str(model), "--text", str(text), "--tokens", "1000000")
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert len(ended.stderr.splitlines()) == 1
