"""The format of calls follows from the template; an option overrides it."""

from __future__ import annotations

import pytest

from optkit.serve.tools.formats import HERMES, JSON, LLAMA3_JSON, ChatFormat, choose_format
from optkit.serve.tools.parts import Part
from optkit.serve.tools.use import Tool, ToolUse
from optkit.text.chat_template import ChatTemplate
from optkit.text.template_traits import TemplateTraits, find_traits
from tests.support import chat_templates

USE = ToolUse((Tool("f"),), (Tool("f"),))


def chosen(source: str, *parsers: str) -> ChatFormat:
    return choose_format(find_traits(ChatTemplate(source, {"bos_token": ""})), *parsers)


def test_format_is_the_template_s_own() -> None:
    assert (chosen(chat_templates.QWEN).calls, chosen(chat_templates.QWEN).native) == (HERMES, True)
    assert (chosen(chat_templates.LLAMA3).calls, chosen(chat_templates.LLAMA3).native) == (LLAMA3_JSON, True)


@pytest.mark.parametrize("source", [chat_templates.CHATML, chat_templates.MISTRAL, chat_templates.GEMMA])
def test_format_is_generic_when_the_template_has_none_with_a_parser(source: str) -> None:
    assert (chosen(source).calls, chosen(source).native) == (HERMES, False)


def test_option_overrides_the_template() -> None:
    assert (chosen(chat_templates.MISTRAL, "json").calls, chosen(chat_templates.MISTRAL, "json").native) == (
        JSON,
        True,
    )
    assert (
        chosen(chat_templates.CHATML, "hermes").calls,
        chosen(chat_templates.CHATML, "hermes").native,
    ) == (
        HERMES,
        False,
    )
    assert not chosen(chat_templates.QWEN3, "auto", "none").thinks
    assert chosen(chat_templates.CHATML, "auto", "qwen3").thinks


def test_answer_without_tools_and_reasoning_needs_no_parser() -> None:
    assert chosen(chat_templates.QWEN).parser(None, "prompt") is None
    assert choose_format(TemplateTraits(thinks=True)).parser(None, "", goes_on=True) is None


def test_parser_reads_reasoning_first_and_ignores_calls_in_it() -> None:
    parser = chosen(chat_templates.QWEN3).parser(USE, "<|im_start|>assistant\n")
    assert parser is not None
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parts = parser.push(f"<think>{call}</think>\n\nOk{call}") + parser.finish()
    name = parts[-1].call_id
    assert parts == [Part("reasoning", call), Part("content", "Ok"), Part("call", "{}", 0, "f", name)]
    assert parser.num_calls == 1
