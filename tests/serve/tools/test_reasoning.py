"""Reasoning and content come apart, however the text is cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.serve.tools.parts import joined, text_of
from optkit.serve.tools.reasoning import ReasoningParser, leaves_open
from tests.support.call_texts import cut

PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "\n", "<", "</thi", "think>", " ", "a b", "é"])
    | st.text(max_size=4),
    max_size=12,
)


def parse(is_open: bool, pieces: list[str]) -> tuple[Any, ...]:
    parser = ReasoningParser(is_open)
    parts = joined([part for piece in pieces for part in parser.push(piece)] + parser.finish())
    return tuple(parts)


def split(text: str, is_open: bool) -> tuple[str, str]:
    parts = parse(is_open, [text])
    return text_of(parts, "reasoning"), text_of(parts, "content")


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("Hm.\n</think>\n\nYes.\n", True, "Hm.", "Yes.\n"),
        ("\n<think>\nHm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        (" Yes, <think> no", False, "", " Yes, <think> no"),
        ("Hm, cut of", True, "Hm, cut of", ""),
        ("<think>Hm </thin", False, "Hm </thin", ""),
        ("<thin", False, "", "<thin"),
        ("a\n\nb</think>c</think>", True, "a\n\nb", "c</think>"),
        ("", True, "", ""),
    ],
)
def test_text_is_split(text: str, is_open: bool, reasoning: str, content: str) -> None:
    assert split(text, is_open) == (reasoning, content)


@given(pieces=PIECES, is_open=st.booleans(), cuts=st.randoms(use_true_random=False))
def test_any_text_gives_the_same_parts_in_any_pieces(
    pieces: list[str], is_open: bool, cuts: random.Random
) -> None:
    text = "".join(pieces)
    assert parse(is_open, cut(cuts, text)) == parse(is_open, list(text)) == parse(is_open, [text])


@given(pieces=PIECES)
def test_text_that_does_not_begin_with_the_tag_is_unchanged(pieces: list[str]) -> None:
    text = "".join(pieces)
    if not text.lstrip().startswith("<think>"):
        assert split(text, False) == ("", text)


@given(pieces=PIECES)
def test_nothing_but_tags_and_newlines_is_lost(pieces: list[str]) -> None:
    text = "".join(pieces)
    joined_text = "".join(split(f"<think>{text}", False)).replace("\n", "")
    assert joined_text == text.replace("</think>", "", 1).replace("\n", "")


def test_prompt_that_ends_with_the_tag_leaves_the_reasoning_open() -> None:
    assert leaves_open("<|im_start|>assistant\n<think>\n") and not leaves_open("<think>\n\n</think>\n\n")
