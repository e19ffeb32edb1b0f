"""A template may be wrong, but it does not hang the server, fill its memory, or reach what is none of its business."""

from __future__ import annotations

import time
from typing import Any

import pytest

from penstock.core.errors import ConfigError, InvalidRequest
from penstock.text import sandbox
from penstock.text.chat import ChatTemplate

PATIENCE = 30.0  # seconds, on a slow core; without limits each of these takes hours or all memory
HOSTILE = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops over text": "{% for a in m %}{% for b in m %}{% for c in m %}{% endfor %}{% endfor %}{% endfor %}",
    "a long range": "{% for i in range(10**9) %}x{% endfor %}",
    "repetition": "{{ 'a' * 10**10 }}",
    "repetition of lists": "{{ ([1] * 10**10) | length }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "adding": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "blocks": "{% set n = namespace(x='a') %}{% for i in range(60) %}"
    "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "lists in lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "lists as json": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "much text": "{% for i in range(90000) %}" + "x" * 9000 + "{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "padding": "{{ 'a'.ljust(10**10) }}",
    "centre": "{{ 'a' | center(10**10) }}",
    "indent": "{{ ('a\n' * 1000) | indent(10**9) }}",
    "json indent": "{{ [1] | tojson(indent=10**10) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "format argument": "{{ '%*d' % (10**10, 1) }}",
    "format method": "{{ '{:10000000000}'.format(1) }}",
    "format method argument": "{{ '{:{}}'.format(1, 10**10) }}",
    "format filter": "{{ '%10000000000s' | format(1) }}",
    "replace": "{{ ('a' * 90000).replace('a', 'b' * 90000) }}",
    "replace filter": "{{ ('a' * 90000) | replace('a', 'b' * 90000) }}",
    "join": "{{ ('a' * 90000).join(['b'] * 90000) }}",
    "join filter": "{{ (['b' * 90000] * 90000) | join }}",
    "grouping": "{{ (m * 100) | groupby('a') }}",
    "rejecting": "{{ (m * 100) | rejectattr('a') | list }}",
    "what a filter yields": "{{ range(99999) | map('string') | map('upper') | map('lower') | sum }}",
    "links": "{{ (m * 100) | urlize }}",
    "wrapping": "{{ (m * 100) | wordwrap(1) }}",
    "join of characters": "{{ ('b' * 90000) | join('a' * 90000) }}",
}


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source, "here", {}).render(
        [{"role": "user", "content": "hi"}],
        add_generation_prompt=True,
        continue_final_message=False,
        tools=None,
        template_kwargs=variables,
    )


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_what_would_never_end_is_refused(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 100_000)  # as soon as possible
    begun = time.monotonic()
    with pytest.raises(InvalidRequest, match="messages: the chat template failed: "):
        render(source, m="a" * 2000)
    assert time.monotonic() - begun < PATIENCE


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ ('%s' | attr('format')).__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% set messages[0].x = 1 %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
    ],
)
def test_nothing_but_the_variables_is_in_reach(source: str) -> None:
    try:
        text = render(source)
    except (InvalidRequest, ConfigError):
        return
    assert "class" not in text
    assert "root" not in text


def test_a_template_that_is_nested_too_deeply_is_no_template() -> None:
    with pytest.raises(ConfigError, match="here: not a valid chat template"):
        ChatTemplate("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", "here", {})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for x in 'ab' %}{{ loop.index }}/{{ loop.length }}{{ x }}{{ loop.last }}{% endfor %}",
            "1/2aFalse2/2bTrue",
        ),
        ("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{% for k, v in {'a': 1}.items() %}{{ k ~ '=' ~ v ~ none }}{% endfor %}", "a=1None"),
        ("{% for x in nothing %}x{% else %}none{% endfor %}", "none"),
        ("{{ '%s-%03d' % ('a', 7) }} {{ '{}-{:>4}'.format('a', 7) }} {{ '%s' | format(3) }}", "a-007 a-   7 3"),
        ("{{ [1, 2] + [3] }} {{ 2 ** 10 }} {{ 7 % 4 }} {{ '-' * 5 }} {{ 'a' + 'b' }}", "[1, 2, 3] 1024 3 ----- ab"),
        ("{{ ['a', 'b'] | join(', ') }} {{ '-'.join(['a', 'b']) }} {{ 'aXb'.replace('X', '') }}", "a, b a-b ab"),
        ("{{ {'a': [1]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{{ 'a\nb' | indent(2) }}|{{ 'a' | center(3) }}|{{ 'a'.ljust(2) }}|", "a\n  b| a |a |"),
        ("{{ [{'n': 2}, {'n': 1}] | map(attribute='n') | sort | list }}", "[1, 2]"),
        ("{% macro f(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call f(2) %}in{% endcall %}", "<2in>"),
    ],
)
def test_what_templates_do_stays_as_it_is(source: str, text: str) -> None:
    assert render(source) == text


def test_long_conversations_pass() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
    messages: list[dict[str, Any]] = [{"role": "user", "content": "word " * 100}] * 10_000
    text = ChatTemplate(source, "here", {}).render(
        messages, add_generation_prompt=True, continue_final_message=False, tools=None, template_kwargs={}
    )
    assert text.count("<user>") == 10_000
