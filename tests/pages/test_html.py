"""Elements: everything but ``Markup`` is escaped."""

from __future__ import annotations

import pytest

from optkit.pages.html import Markup, details, element, html_table, items, join, prose_table, tag, wide_table
from tests.support.parsed_page import ParsedPage

ATTACK = "</td><script>alert(1)</script>\"'&"


def test_text_and_attributes_are_escaped_and_markup_is_not() -> None:
    made = tag("p", ATTACK, Markup("<b>x</b>"), None, class_="a", data_label=ATTACK, title=None)
    parsed = ParsedPage(made)
    assert parsed.tags == {"p", "b"} and parsed.attributes == {"class", "data-label"}
    assert parsed.words == ATTACK + "x"


@pytest.mark.parametrize(
    "made",
    [
        element("p", ATTACK),
        html_table([ATTACK], [[ATTACK]], ATTACK),
        wide_table([ATTACK], [[ATTACK]], ATTACK),
        prose_table([ATTACK], [[ATTACK]]),
        details(ATTACK, ATTACK),
        items([ATTACK]),
        join([ATTACK]),
    ],
)
def test_no_helper_lets_text_become_markup(made: Markup) -> None:
    parsed = ParsedPage(made)
    assert "script" not in parsed.tags and ATTACK in parsed.words


def test_coordinates_are_short() -> None:
    assert tag("line", x1=1.23456, y1=2.0, width=0.004) == '<line x1="1.23" y1="2" width="0"></line>'
