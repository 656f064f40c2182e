"""Calls come out of a text as they went in, however the text is cut; other text is unchanged."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.serve.tools.formats import FORMATS, HERMES, JSON, LLAMA3_JSON
from optkit.serve.tools.parser import CallFormat, ToolCallParser
from optkit.serve.tools.parts import Part, calls_of, joined, text_of
from tests.support.call_texts import FRAGMENTS, NAMES, cut, random_answer

ALL = list(FORMATS.values())
PIECES = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), max_size=25)


def parse(
    form: CallFormat, pieces: list[str], names: tuple[str, ...] = NAMES, parallel: bool = True
) -> list[Part]:
    """All parts, neighbours joined; calls are named by their number."""
    parser = ToolCallParser(form, names, parallel, lambda: f"call_{parser.num_calls}")
    parts = [part for piece in pieces for part in parser.push(piece)]
    return joined([*parts, *parser.finish()])


def read(form: CallFormat, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls of a whole text; arguments parsed where they are JSON."""
    parts = parse(form, [text])
    return text_of(parts, "content"), [(call.name, parsed(call.arguments)) for call in calls_of(parts)]


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# -- the fuzz: random answers, whose calls are known ----------------------------------------------------------


@pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)
@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.soak)])
def test_no_call_is_lost_doubled_or_invented_however_the_text_is_cut(form: CallFormat, count: int) -> None:
    for seed in range(count):
        dice = random.Random(seed)
        answer = random_answer(dice, form)
        whole = parse(form, [answer.text])
        calls = [(call.name, parsed(call.arguments)) for call in calls_of(whole)]
        assert (text_of(whole, "content"), calls) == (answer.content, answer.calls), (seed, answer.text)
        assert parse(form, cut(dice, answer.text)) == whole, (seed, answer.text)


@pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)
@given(
    pieces=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), max_size=25),
    cuts=st.randoms(use_true_random=False),
)
def test_any_text_gives_the_same_parts_in_any_pieces(
    form: CallFormat, pieces: list[str], cuts: random.Random
) -> None:
    text = "".join(pieces)
    whole = parse(form, [text])
    assert parse(form, list(text)) == whole
    assert parse(form, cut(cuts, text)) == whole


@pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)
@given(pieces=PIECES)
def test_any_text_without_a_known_name_is_content_unchanged(form: CallFormat, pieces: list[str]) -> None:
    text = "".join(pieces)
    assert parse(form, list(text), names=("no_such_tool",)) == ([Part("content", text)] if text else [])


# -- streaming ----------------------------------------------------------------------------------------------


def test_a_stream_has_the_name_first_and_then_arguments_as_they_come() -> None:
    parser = ToolCallParser(HERMES, ["f"], new_id=lambda: "id")
    text = 'Ok.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    found = [(piece, parser.push(piece)) for piece in text]
    shown = [(piece, part) for piece, parts in found for part in parts]
    assert shown[:3] == [
        ("O", Part("content", "O")),
        ("k", Part("content", "k")),
        (".", Part("content", ".")),
    ]
    assert shown[3] == ("{", Part("call", "{", 0, "f", "id"))
    assert "".join(part.text for _, part in shown[3:]) == '{"a": 1}' and len(shown) == 3 + len('{"a": 1}')
    assert parser.finish() == []


@pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)
def test_plain_text_is_held_back_by_no_more_than_a_token_of_whitespace(form: CallFormat) -> None:
    parser = ToolCallParser(form, ["f"])
    seen = ""
    for word in ["The", " cat", " sat", ".", "\n\n", "It", " is", " < 3"]:
        seen += word
        got = "".join(part.text for part in parser.push(word))
        assert got.strip() == word.strip()


def test_without_parallel_calls_the_answer_ends_with_the_first() -> None:
    text = '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"b": 1}}'
    parts = parse(LLAMA3_JSON, list(text), parallel=False)
    assert [call.arguments for call in calls_of(parts)] == ["{}"] and text_of(parts, "content") == ""


# -- examples: what models write ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", {"a": 1})]),  # Hermes 2
        ('<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "f"}', "", [("f", {}), ("f", {})]),
        ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>\nDone', "Done", [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": {}}\nDone', "Done", [("f", {})]),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>',) * 2 + ([],),
        ("<tool_call>f(1)</tool_call>",) * 2 + ([],),
        ('Use <tool_call>{"na',) * 2 + ([],),
    ],
)
def test_hermes_reads(text: str, content: str, calls: list[Any]) -> None:
    assert read(HERMES, text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
        ('{"type": "function", "name": "f", "parameters": {}}', "", [("f", {})]),
        ('{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}', "", [("f", {})] * 2),
        ('```json\n[{"name": "f", "arguments": {}}]\n```', "", [("f", {})]),
        ('{"name": "f"}',) * 2 + ([],),
        ('{"name": "f", "age": 7}',) * 2 + ([],),
        ('{"name": "f", "parameters": 7}',) * 2 + ([],),
        ('I call {"name": "f", "parameters": {}}',) * 2 + ([],),
        ("```python\nprint({})\n```",) * 2 + ([],),
        ("[1, 2]",) * 2 + ([],),
    ],
)
def test_bare_json_reads(text: str, content: str, calls: list[Any]) -> None:
    assert read(LLAMA3_JSON, text) == read(JSON, text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', '{"a": 1,}'),
        ('<tool_call>{"name": "f", "arguments": {\'a\': 1}}</tool_call>', "{'a': 1}"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', '{"a": 1'),
        ('<tool_call>{"name": "f", "arguments": {"a": "cut he', '{"a": "cut he'),
    ],
)
def test_malformed_arguments_reach_the_caller_as_they_are(text: str, arguments: str) -> None:
    [call] = calls_of(parse(HERMES, list(text)))
    assert call.arguments == arguments
