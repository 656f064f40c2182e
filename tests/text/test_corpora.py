"""The shipped texts: there, clean, and disjoint."""

import pytest

from optkit.errors import UserError
from optkit.text.corpora import NAMES, load_text


@pytest.mark.parametrize("name", NAMES)
def test_text_is_prose(name):
    text = load_text(name)
    assert 200_000 < len(text) < 500_000
    assert "<p" not in text and "Gutenberg" not in text and "::" not in text[:2000]
    letters = sum(c.isalpha() or c in " ,.'\n" for c in text)
    assert letters / len(text) > 0.93


def test_texts_share_no_paragraph():
    long = [{p for p in load_text(name).split("\n\n") if len(p) > 60} for name in NAMES]
    assert not long[0] & long[1]


def test_any_prefix_of_the_evaluation_text_mixes_both_sources():
    prefix = load_text("evaluation")[:20_000]
    assert "Tom" in prefix and "SQLite" in prefix


def test_unknown_name_is_a_user_error():
    with pytest.raises(UserError, match="evaluation"):
        load_text("evalution")
