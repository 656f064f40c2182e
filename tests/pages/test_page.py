"""Pages: sections in order, navigation, and what is missing."""

from __future__ import annotations

from optkit.pages.html import paragraph
from optkit.pages.page import Card, Section, cards, page
from tests.support.parsed_page import ParsedPage


def test_sections_without_content_are_left_out_and_their_command_is_told() -> None:
    given = [
        Section("one", "First", [paragraph("a")]),
        Section("two", "Second", [], "second: optkit bench"),
        Section("three", "Third", [paragraph("c")], "third: unused"),
        Section("four", "Fourth"),
    ]
    parsed = ParsedPage(page("A <title>", [paragraph("lead")], given))
    parsed.assert_self_contained()
    assert parsed.links == {"#one", "#three"}
    assert (
        "second: optkit bench" in parsed.words
        and "unused" not in parsed.words
        and "Second" not in parsed.words
    )
    assert parsed.words.index("lead") < parsed.words.index("Third")


def test_a_page_declares_language_width_and_policy() -> None:
    text = page("t", [], [])
    assert '<html lang="en">' in text and "width=device-width" in text
    assert "Content-Security-Policy" in text and "script" not in text
    assert "prefers-color-scheme: dark" in text and "@media print" in text


def test_cards_have_name_value_and_note() -> None:
    (made,) = cards([Card("<b>", "1.0x", "<i>", "good")])
    assert ParsedPage(made).words == "<b>1.0x<i>" and cards([]) == []
    (made,) = cards([Card("a", "1", "", "worse")])
    assert ParsedPage(made).words == "a1worse" and 'class="bad"' in made
