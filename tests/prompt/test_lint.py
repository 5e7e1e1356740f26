"""`Linter` finds each planted breaker as what it is, and nothing in prompts without any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from headstart.core.cost import LinearCosts
from headstart.prompt.lint import Linter, LintReport, Prices, title_of
from headstart.prompt.request import parse_request
from tests.prompt import plants
from tests.prompt.maker import prompt_maker

COSTS = LinearCosts(prefill_token=0.001)
Plant = Callable[[], list[plants.Request]]


def lint(requests: Iterable[plants.Request], *, cache_tokens: int = 1_000_000) -> LintReport:
    maker, linter = prompt_maker(), Linter(COSTS, block_size=16, cache_tokens=cache_tokens)
    for line, request in enumerate(requests, 1):
        linter.feed(maker.make(parse_request(request)), line)
    return linter.report()


@pytest.mark.parametrize(("plant", "kind"), plants.PLANTS.items(), ids=lambda value: getattr(value, "__name__", value))
def test_a_planted_breaker_is_found_as_what_it_is(plant: Plant, kind: str) -> None:
    report = lint(plant())
    assert [breaker.kind for breaker in report.breakers] == [kind]


def test_the_planted_breakers_are_of_many_kinds() -> None:
    assert len(set(plants.PLANTS.values())) >= 12


@pytest.mark.parametrize("clean", plants.CLEAN, ids=lambda value: value.__name__)
def test_nothing_is_found_in_clean_prompts(clean: Callable[[Path], list[plants.Request]], shared_data: Path) -> None:
    requests = clean(shared_data)
    assert len(requests) >= 20
    report = lint(requests)
    assert [(title_of(breaker), breaker.lines, breaker.example) for breaker in report.breakers] == []
