"""The traits of published templates."""

from __future__ import annotations

import pytest

from optkit.text.chat_template import ChatTemplate
from optkit.text.template_traits import TemplateTraits, find_traits
from tests.support import chat_templates


def traits(source: str) -> TemplateTraits:
    return find_traits(ChatTemplate(source, {"bos_token": "<s>"}))


@pytest.mark.parametrize(
    ("source", "tools", "system", "thinks"),
    [
        (chat_templates.CHATML, False, True, False),
        (chat_templates.QWEN, True, True, False),
        (chat_templates.QWEN3, True, True, True),
        (chat_templates.LLAMA3, True, True, False),
        (chat_templates.MISTRAL, True, False, False),
        (chat_templates.GEMMA, False, False, False),
        (chat_templates.THINKS_ALWAYS, False, True, True),
        ("{{ raise_exception('no') }}", False, False, False),
    ],
)
def test_traits_are_those_of_the_template(source: str, tools: bool, system: bool, thinks: bool) -> None:
    found = traits(source)
    assert (found.takes_tools, found.takes_system, found.thinks) == (tools, system, thinks)


def test_call_is_found_in_the_rendered_conversation() -> None:
    qwen, llama, mistral = (
        traits(source) for source in (chat_templates.QWEN, chat_templates.LLAMA3, chat_templates.MISTRAL)
    )
    assert (qwen.call_open.strip(), qwen.call_keys) == ("<tool_call>", ("name", "arguments"))
    assert (llama.call_open, llama.call_keys) == ("", ("name", "parameters"))
    assert "[TOOL_CALLS]" in mistral.call_open
    assert traits(chat_templates.CHATML).call_keys == ()
