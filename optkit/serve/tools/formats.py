"""The formats of tool calls, and the choice of one for a chat template.

=============== ================================================================================
``hermes``      ``<tool_call>{"name": .., "arguments": {..}}</tool_call>``, anywhere (Hermes, Qwen)
``llama3_json`` ``{"name": .., "parameters": {..}}``, the whole answer (Llama 3)
``json``        ``{"name": .., "arguments": {..}}``, the whole answer
=============== ================================================================================

Calls of a template in another form (``optkit.text.template_traits``) have no parser. The prompt then describes tools
and form in words (``optkit.serve.tools.system_text``), as for templates without tools; the form is then ``hermes``,
which small models follow best (docs/lab-notes.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from optkit.serve.tools.message import MessageParser
from optkit.serve.tools.parser import CallFormat, ToolCallParser
from optkit.serve.tools.reasoning import ReasoningParser, leaves_open
from optkit.serve.tools.use import ToolUse
from optkit.text.template_traits import TemplateTraits

HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>", "arguments")
LLAMA3_JSON = CallFormat("llama3_json", "", "", "parameters")
JSON = CallFormat("json", "", "", "arguments")
FORMATS = {form.name: form for form in (HERMES, LLAMA3_JSON, JSON)}
GENERIC = HERMES  # in words
AUTO = "auto"
REASONING_PARSERS = {
    "think": True,
    "deepseek_r1": True,
    "qwen3": True,
    "none": False,
}  # vLLM's names among them


@dataclass(frozen=True)
class ChatFormat:
    """The forms in which a model reads and writes tools and reasoning.

    Attributes:
        calls: the form of tool calls.
        native: the chat template shows tools and calls.
        takes_system: the chat template shows a system message.
        thinks: answers may begin with reasoning.
    """

    calls: CallFormat = GENERIC
    native: bool = False
    takes_system: bool = True
    thinks: bool = False

    def parser(self, use: ToolUse | None, prompt: str, goes_on: bool = False) -> MessageParser | None:
        """The parser of an answer; None for an answer of content alone.

        Args:
            use: the tools of the answer; None without tools.
            prompt: rendered text of the prompt.
            goes_on: the answer continues a message of the prompt.
        """
        reasoning = ReasoningParser(leaves_open(prompt)) if self.thinks and not goes_on else None
        calls = ToolCallParser(self.calls, use.names, use.parallel) if use else None
        return MessageParser(reasoning, calls) if reasoning or calls else None


def choose_format(
    traits: TemplateTraits, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
) -> ChatFormat:
    """The forms for a chat template; a given parser overrides the choice by ``traits``.

    Args:
        tool_call_parser: a key of ``FORMATS``, or "auto".
        reasoning_parser: a key of ``REASONING_PARSERS``, or "auto".
    """
    own = own_format(traits)
    form = (own or GENERIC) if tool_call_parser == AUTO else FORMATS[tool_call_parser]
    thinks = traits.thinks if reasoning_parser == AUTO else REASONING_PARSERS[reasoning_parser]
    is_native = traits.takes_tools and (own is not None or tool_call_parser != AUTO)
    return ChatFormat(form, is_native, traits.takes_system, thinks)


def own_format(traits: TemplateTraits) -> CallFormat | None:
    """The format of the calls in rendered conversations; None without a parser."""
    opening = traits.call_open.strip()
    for form in FORMATS.values():
        if opening == form.open and {"name", form.arguments} <= set(traits.call_keys):
            return form
    return None
