"""The sandbox of chat templates: Hugging Face's dialect, no way out, and no endless loops or huge values."""

from __future__ import annotations

import re
from typing import Any

import pytest

from headstart.text import ChatTemplate, TemplateError


def render(source: str, **variables: Any) -> str:
    return ChatTemplate({"default": source}, {}).render([], **variables)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ {'b': 1, 'a': [1]} | tojson(indent=1, sort_keys=true) }}", '{\n "a": [\n  1\n ],\n "b": 1\n}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02345678"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}b{{ 1 + 1 }}{% endgeneration %}c", "ab2c"),
        ("{{ missing }}|{{ missing is defined }}", "|False"),
        ("{{ '%s-%02d' % ('a', 3) }}", "a-03"),
        ("{{ 'ab' * 3 + 'c' }}{{ 2 ** 10 }}{{ 7 % 4 }}", "abababc10243"),
        ("{{ range(2, 10, 3) | list }}", "[2, 5, 8]"),
    ],
)
def test_the_dialect(source: str, expected: str) -> None:
    assert render(source) == expected


def test_the_time_of_today() -> None:
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", render("{{ strftime_now('%Y-%m-%d') }}"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__}'.format(1) }}{{ ''.__class__() .x.y }}",
        "{% include 'other' %}",
    ],
)
def test_there_is_no_way_out(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10 * 10 * 1000 * 1000 * 1000 }}",
        "{{ (1000000000 * 'a') | length }}",
        "{{ ([0] * 1000000000) | length }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{% set ns = namespace(x='a' * 1024) %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% for i in range(1000) %}{{ 'a' * 100000 }}{% endfor %}",
    ],
)
@pytest.mark.timeout(20)
def test_a_template_ends_and_stays_small(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


def test_the_budget_of_one_rendering_is_not_the_next_ones() -> None:
    template = ChatTemplate({"default": "{% for i in range(90000) %}{% endfor %}ok"}, {})
    assert [template.render([]) for _ in range(4)] == ["ok"] * 4
