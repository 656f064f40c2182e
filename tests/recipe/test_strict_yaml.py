"""Strict YAML: refused documents, and errors for any text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.errors import UserError
from optkit.recipe.load import parse_recipe
from tests.support.demo_recipe import TEXT, message


def test_parse_recipe_refuses_a_document_that_is_no_mapping() -> None:
    for text in ("", "- a", "3", "null"):
        assert "mapping" in message(text)


def test_parse_refuses_a_document_that_is_nested_too_deeply() -> None:
    assert "deep" in message("a: " + "[" * 5000)


def test_parse_refuses_a_document_that_is_too_long() -> None:
    assert "longer" in message("#" * (1 << 21))


@settings(deadline=None)
@given(st.text(max_size=40), st.lists(st.text(max_size=20), max_size=2))
def test_parse_raises_only_user_errors_for_any_text(text: str, overrides: list[str]) -> None:
    with pytest.raises(UserError):
        parse_recipe(text, overrides=overrides)
    with pytest.raises(UserError):
        parse_recipe(TEXT, overrides=["slo." + text])


yaml_noise = st.text("!!int &a*b<<:{}[],-?|>'\"#%@`\n 0x1e_.~nulltrue", max_size=30)


@settings(deadline=None)
@given(yaml_noise)
def test_parse_raises_only_user_errors_for_yaml_syntax_noise(text: str) -> None:
    for candidate in (text, f"{TEXT}\n{text}", TEXT.replace("a test", text)):
        try:
            parse_recipe(candidate)
        except UserError as error:
            assert error.what
