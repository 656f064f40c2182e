"""Patterns of ``strftime_now`` in chat templates, and the templates where they are unknown."""

from __future__ import annotations

import pytest

from optkit.text.chat_template import ChatTemplate
from optkit.text.template_time import time_formats

LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
Today is {{ date_string }}{{ messages[0].content }}"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content }}", ()),
        (LLAMA, ("%d %b %Y",)),
        ("{{ strftime_now('%H') }}{{ strftime_now('%Y') }}{{ strftime_now('%H') }}", ("%H", "%Y")),
        ("{# strftime_now(x) #}a", ()),
        ("{{ strftime_now(pattern) }}", None),
        ("{{ strftime_now('%' ~ 'H') }}", None),
        ("{{ strftime_now(*patterns) }}", None),
        ("{{ strftime_now(pattern='%H') }}", None),
        ("{% set now = strftime_now %}{{ now('%H') }}", None),
        ("{{ [1, 2] | random }}", None),
        ("{{ '%H' | map(strftime_now) }}", None),
    ],
)
def test_patterns_of_a_template(source: str, expected: tuple[str, ...] | None) -> None:
    assert time_formats(ChatTemplate(source)) == expected
