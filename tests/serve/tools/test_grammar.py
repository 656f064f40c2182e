"""Grammars of calls, judged by llguidance: what the parser reads as valid calls is allowed, and nothing else."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from optkit.runtime.types import Constraint
from optkit.serve.constraints.checker import NamedConstraint
from optkit.serve.http.errors import ApiError
from optkit.serve.tools.formats import FORMATS, ChatFormat
from optkit.serve.tools.grammar import message_constraint
from optkit.serve.tools.system_text import call_text
from optkit.serve.tools.use import Tool, ToolUse
from tests.support.tiny_tokenizer import fast_tokenizer

llguidance = pytest.importorskip("llguidance", reason="pip install 'optkit[structured]'")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": ["string", "null"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
STRICT, LOOSE = (
    Tool("f", None, SCHEMA, strict=True),
    Tool("g", None, {"properties": {"x": {"type": "boolean"}}}),
)
GOOD, BAD = '{"a": 1, "b": null}', '{"a": "1", "b": null}'
CASES = [
    (ChatFormat(form, thinks=thinks), prompt)
    for form, thinks in itertools.product(FORMATS.values(), (False, True))
    for prompt in (("", "<think>\n") if thinks else ("",))
]


def constraint(chat: ChatFormat, use: ToolUse | None, prompt: str, given: Any = None) -> Constraint | None:
    named = message_constraint(chat, use, given, prompt)
    assert named is None or named.param == "tools"
    return named.constraint if named else None


def use(required: bool, parallel: bool = True, tools: tuple[Tool, ...] = (STRICT, LOOSE)) -> ToolUse:
    return ToolUse(tools, tools, required, parallel)


def allows(held: Constraint | None, text: str) -> bool:
    """True if ``text``, from its beginning, may be the whole answer."""
    assert held is not None and held.kind == "grammar"
    fast = fast_tokenizer()
    tokenizer = llguidance.LLTokenizer(fast.to_str(), eos_token=fast.token_to_id("<|im_end|>"))
    matcher = llguidance.LLMatcher(tokenizer, held.value)
    assert not matcher.get_error()
    if held.after:
        assert held.after in text
        text = text.partition(held.after)[2]
    ids = fast.encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def reasoning(chat: ChatFormat, prompt: str) -> str:
    if not chat.thinks:
        return ""
    return "Hm.\n</think>\n\n" if prompt else "<think>\nHm.\n</think>\n\n"


@pytest.mark.parametrize(("chat", "prompt"), CASES)
def test_required_allows_valid_calls_and_nothing_else(chat: ChatFormat, prompt: str) -> None:
    held, before = constraint(chat, use(required=True), prompt), reasoning(chat, prompt)
    good = call_text(chat.calls, "f", GOOD)
    assert allows(held, before + good)
    assert allows(held, f"{before}{good}\n{good}")
    assert allows(held, before + call_text(chat.calls, "g", '{"x": true}'))
    for text in ("", "Hello", call_text(chat.calls, "f", BAD), call_text(chat.calls, "h", "{}"), good + "!"):
        assert not allows(held, before + text), text
    assert not allows(constraint(chat, use(required=True, parallel=False), prompt), f"{before}{good}\n{good}")


@pytest.mark.parametrize(("chat", "prompt"), CASES)
def test_strict_allows_text_and_valid_calls(chat: ChatFormat, prompt: str) -> None:
    held, before = constraint(chat, use(required=False), prompt), reasoning(chat, prompt)
    good = call_text(chat.calls, "f", GOOD)
    loose = call_text(chat.calls, "g", '{"x": {"any": ["thing"]}}')
    for text in ("", "Hello <b>, {", "```python\n```", good, f"{good}\n{loose}"):
        assert allows(held, before + text), text
    for text in (call_text(chat.calls, "f", BAD), call_text(chat.calls, "h", "{}")):
        assert not allows(held, before + text), text
    if chat.calls.open:
        assert allows(held, f"{before}I look: {good} there") and not allows(
            held, f"{before}x {chat.calls.open}"
        )


def test_free_tools_and_no_tools_are_not_constrained() -> None:
    assert constraint(ChatFormat(), use(required=False, tools=(LOOSE,)), "") is None
    assert constraint(ChatFormat(), None, "") is None


@pytest.mark.parametrize(("chat", "prompt"), CASES)
def test_response_format_holds_the_content_beside_calls(chat: ChatFormat, prompt: str) -> None:
    given = NamedConstraint(Constraint("json_schema", json.dumps(SCHEMA)), "response_format")
    held, before = constraint(chat, use(required=False), prompt, given), reasoning(chat, prompt)
    for text in (GOOD, call_text(chat.calls, "f", GOOD), call_text(chat.calls, "g", '{"any": 1}')):
        assert allows(held, before + text), text
    for text in ("Hello", BAD, call_text(chat.calls, "f", BAD), ""):
        assert not allows(held, before + text), text
    named = {"type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": True}
    alike = NamedConstraint(Constraint("json_schema", json.dumps(named)), "response_format")
    held = constraint(chat, use(required=False), prompt, alike)
    for text in (
        '{"name": "fog"}',
        '{"name": "f", "arguments": 7}',
        '{"nam": 1}',
        call_text(chat.calls, "f", GOOD),
    ):
        assert allows(held, before + text), text


def test_required_call_leaves_no_room_for_a_response_format() -> None:
    given = NamedConstraint(Constraint("regex", "a*"), "guided_regex")
    held = constraint(ChatFormat(FORMATS["json"]), use(required=True), "", given)
    assert allows(held, call_text(FORMATS["json"], "f", GOOD)) and not allows(held, "aa")


def test_other_constraints_exclude_tools() -> None:
    given = NamedConstraint(Constraint("regex", "a*"), "guided_regex")
    with pytest.raises(ApiError) as caught:
        message_constraint(ChatFormat(), use(required=False), given, "")
    assert caught.value.param == "guided_regex"


def test_constraint_without_tools_begins_behind_open_reasoning() -> None:
    given = NamedConstraint(Constraint("regex", "a*"), "guided_regex")
    held = message_constraint(ChatFormat(thinks=True), None, given, "<think>")
    assert held == NamedConstraint(Constraint("regex", "a*", after="</think>"), "guided_regex")
    assert message_constraint(ChatFormat(thinks=True), None, given, "<think>", goes_on=True) == given
    assert message_constraint(ChatFormat(), None, given, "") == given


def test_unknown_keyword_is_refused_in_a_strict_tool_and_ignored_in_another() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}}}
    fast = fast_tokenizer()
    tokenizer = llguidance.LLTokenizer(fast.to_str(), eos_token=fast.token_to_id("<|im_end|>"))
    for strict in (True, False):
        held = constraint(ChatFormat(), use(required=True, tools=(Tool("f", None, odd, strict),)), "")
        assert held is not None
        error = llguidance.LLMatcher(tokenizer, held.value).get_error()
        assert bool(error) == strict


def test_schema_is_in_the_grammar_as_it_is() -> None:
    held = constraint(ChatFormat(), use(required=True), "")
    assert held is not None
    [line] = [line for line in held.value.splitlines() if line.startswith("arguments_0: %json ")]
    assert SCHEMA.items() <= json.loads(line.removeprefix("arguments_0: %json ")).items()


def test_a_required_call_has_no_argument_that_the_tool_does_not_name() -> None:
    """As strict mode does, and as other servers do: a function refuses arguments out of nowhere."""
    chat = ChatFormat(FORMATS["json"])
    held = constraint(chat, use(required=True), "")
    assert allows(held, call_text(chat.calls, "g", '{"x": true}'))
    assert not allows(held, call_text(chat.calls, "g", '{"x": true, "type": "string"}'))
    anything = Tool("h", None, {"type": "object"})
    held = constraint(chat, use(required=True, tools=(anything,)), "")
    assert allows(held, call_text(chat.calls, "h", '{"y": 1}'))
