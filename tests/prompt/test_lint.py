"""Every planted breaker is found, by its kind; nothing is found in clean logs."""

from __future__ import annotations

import pytest

from headstart.core.cost import LinearCosts
from headstart.prompt import Kind, read_request
from headstart.prompt.lint import Linter, LintReport, TokenCounter, lint
from tests.prompt.planted import Request, clean, planted

PLANTED, CLEAN = planted(), clean()


def words(text: str) -> list[int]:
    return [0] * len(text.split())


def judge(log: list[Request], **options: object) -> LintReport:
    linter = Linter(TokenCounter(words), LinearCosts(prefill_token=0.002), **options)  # type: ignore[arg-type]
    return lint(map(read_request, log), linter)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_breaker_is_found(name: str) -> None:
    kind, log = PLANTED[name]
    breakers = judge(log, min_tokens=16).breakers
    assert [breaker.divergence.kind for breaker in breakers][:1] == [kind]
    assert sum(b.requests for b in breakers if b.divergence.kind is kind) * 2 > sum(b.requests for b in breakers)
    assert breakers[0].divergence.advice


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_log_has_none(name: str) -> None:
    report = judge(CLEAN[name])
    assert [(breaker.divergence, breaker.lines) for breaker in report.breakers] == []
    assert report.requests == len(CLEAN[name])


def test_kinds_are_many() -> None:
    assert len({kind for kind, _ in PLANTED.values()}) >= 12
    assert {kind for kind, _ in PLANTED.values()} <= set(Kind)
