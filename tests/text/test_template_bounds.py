"""The budget of one rendering: what makes much from little is refused before it runs, what runs long ends."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest
from jinja2 import Environment

from headstart.text import ChatTemplate, TemplateError, template_bounds


def render(source: str, **variables: Any) -> str:
    return ChatTemplate({"default": source}, {}).render([], **variables)


HUGE = [
    "{{ 'x' | center(500000000) }}",
    "{{ 'x'.center(500000000) }}",
    "{{ 'x'.ljust(500000000) }}",
    "{{ 'x'.rjust(500000000, '-') }}",
    "{{ 'x'.zfill(500000000) }}",
    "{{ ['x'] | map('center', 500000000) | list }}",
    "{% set pad = 'x'.ljust %}{{ pad(500000000) }}",
    "{{ 'x'.encode().ljust(500000000) }}",
    "{{ ('\t' * 1000).expandtabs(1000000) }}",
    "{{ ('\t' * 1000).expandtabs(tabsize=1000000) }}",
    "{{ ('a\n' * 10000) | indent(100000) }}",
    "{{ 'a' | indent(500000000, first=true) }}",
    "{{ 'a' | indent('x' * 30000000 + 'x' * 30000000) }}",
    "{{ ('a ' * 100000) | wordwrap(1, wrapstring='x' * 10000) }}",
    "{{ '%500000000d' | format(1) }}",
    "{{ '{:500000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 500000000) }}",
    "{{ '{x:>500000000}'.format_map({'x': 1}) }}",
    "{{ ['a' * 1000000] * 1000 }}",
    "{{ 1000 * ('a' * 1000000,) }}",
    "{% set a = 'a' * 1000000 %}{{ [" + "a, " * 100 + "] | join }}",
    "{% set a = 'a' * 1000000 %}{{ ''.join([" + "a, " * 100 + "]) }}",
    "{% set a = {'k': 'a' * 1000000} %}{{ [" + "a, " * 100 + "] | join(attribute='k') }}",
    "{{ ('a' * 1000000).join('b' * 1000) }}",
    "{{ (['a'] * 1000) | join('b' * 1000000) }}",
    "{{ (['a'] * 1000) | join(d='b' * 1000000) }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "{{ [1] | batch(500000000, 'x') | list }}",
    "{{ [1] | slice(500000000) | list }}",
    "{{ {'a': [1]} | tojson(indent=500000000) }}",
    "{{ (1).to_bytes(500000000, 'big') }}",
    "{{ lipsum(n=1000000) }}",
    "{% set ns = namespace(x='a') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=7) %}{% for i in range(64) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(64) %}{% set t %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = t %}{% endfor %}",
    "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='a') %}"
    "{% for i in range(64) %}{% set ns.x = twice(ns.x) %}{% endfor %}",
    "{% macro long() %}{% for i in range(150000) %}" + "literal text" * 100 + "{% endfor %}{% endmacro %}{{ long() }}",
    "{% filter upper %}{% for i in range(100000) %}{{ 'a' * 10000 }}{% endfor %}{% endfilter %}",
]


@pytest.mark.parametrize("source", HUGE, ids=lambda source: source[:60])
@pytest.mark.timeout(60)
def test_nothing_huge_is_made(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TemplateError):
            render(source)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 400_000_000


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'x' | center(5) }}|{{ 'x'.ljust(3) }}|{{ '7'.zfill(3) }}|{{ '7'.rjust(2, '-') }}", "  x  |x  |007|-7"),
        ("{{ 'a\nb' | indent(2) }}|{{ 'a\nb' | indent(width=1, first=true) }}|{{ 'a' | indent('> ', true) }}", None),
        ("{{ '%03d' | format(7) }}|{{ '{:>4}|{x}'.format(1, x=2) }}", "007|   1|2"),
        ("{{ ['a', 1] | join(', ') }}|{{ [{'k': 'v'}] | join(attribute='k') }}|{{ ','.join(['a', 'b']) }}", None),
        ("{{ {'a': 1}.items() | map('join', '=') | join }}|{{ range(3) | join('-') }}", "a=1|0-1-2"),
        ("{{ 'aXa' | replace('a', 'b') }}|{{ 'aXa'.replace('a', 'b', 1) }}|{{ 5 | replace('5', '6') }}", "bXb|bXa|6"),
        ("{{ [1, 2, 3] | batch(2, 0) | list }}|{{ [1, 2] | slice(2) | list }}", "[[1, 2], [3, 0]]|[[1], [2]]"),
        ("{{ 'a b' | wordwrap(1) }}|{{ '\t'.expandtabs(2) }}|{{ 'a' ~ 1 ~ none ~ missing }}", "a\nb|  |a1None"),
        ("{% for i in [1, 2, 3] if i > 1 %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}", None),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% else %}none{% endfor %}", "a1"),
        ("{% for i in missing %}x{% else %}none{% endfor %}", "none"),
        ("{% for i in 'ab' %}{{ loop.revindex }}{{ i }}{% endfor %}", "2a1b"),
        ("{% macro m(x, y='d') %}<{{ x }}{{ y }}{{ caller() if caller }}>{% endmacro %}{{ m(1) }}", "<1d>"),
        ("{% set t %}a{{ 1 }}{% endset %}{{ t }}{% filter upper %}b{{ 'c' }}{% endfilter %}", "a1BC"),
        (
            "{% for n in [{'v': 1, 'c': [{'v': 2, 'c': []}]}] recursive %}{{ n.v }}({{ loop(n.c) }}){% endfor %}",
            "1(2())",
        ),
    ],
)
def test_what_is_bounded_works_as_jinja_has_it(source: str, expected: str | None) -> None:
    plain = Environment(trim_blocks=True, lstrip_blocks=True).from_string(source).render()
    assert render(source) == plain
    assert expected is None or plain == expected


LOOPS = "{% for a in items %}{% for b in items %}{% for c in items %}{% endfor %}{% endfor %}{% endfor %}"
CALLS = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}"
TREE = "{% for a in items recursive %}{% if loop.depth < 40 %}{{ loop(items) }}{% endif %}{% endfor %}"


@pytest.mark.parametrize("source", [LOOPS, CALLS, TREE])
@pytest.mark.timeout(60)
def test_loops_and_calls_end(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(template_bounds, "MAX_SECONDS", 1.0)
    with pytest.raises(TemplateError, match=r"takes more than \d+ steps|computes for more than"):
        render(source, items=list(range(300)))


def test_long_computations_end_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds, "MAX_SECONDS", 0.2)
    begun = time.thread_time()
    with pytest.raises(TemplateError, match=r"computes for more than 0\.2 s"):
        render("{% for a in items %}{{ items | sort | length }}{% endfor %}", items=list(range(2_000, 0, -1)))
    assert time.thread_time() - begun < 5.0


def test_ten_thousand_messages_are_within_the_budget() -> None:
    source = "{% for m in messages %}{% for part in m.content %}[{{ part.text | trim }}]{% endfor %}{% endfor %}"
    content = [{"type": "text", "text": " a "}] * 5
    messages = [{"role": "user", "content": content}] * 10_000
    assert ChatTemplate({"default": source}, {}).render(messages) == "[a]" * 50_000
