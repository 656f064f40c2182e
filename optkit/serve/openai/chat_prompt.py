"""Chat requests to prompt texts, by the model's chat template."""

from __future__ import annotations

from typing import Any

from optkit.serve.http.errors import ApiError
from optkit.serve.openai.protocol import ChatRequest
from optkit.serve.tools.formats import ChatFormat
from optkit.serve.tools.system_text import in_words
from optkit.text.chat_template import ChatTemplate, TemplateFailure

RESERVED = frozenset(["messages", "tools", "documents", "add_generation_prompt", "chat_template"])


def render_chat(template: ChatTemplate | None, chat: ChatFormat, request: ChatRequest) -> str:
    """The messages and tools of ``request`` as a single text.

    Raises:
        ApiError: 400, there is no template, or the template refuses.
    """
    if template is None:
        message = "this model has no chat template; use /v1/completions"
        raise ApiError(message, param="messages", code="no_chat_template")
    reserved = RESERVED | set(template.special_tokens)
    for name in (request.chat_template_kwargs or {}).keys() & reserved:
        raise ApiError(f"'{name}' cannot be set here", param="chat_template_kwargs", code="invalid_value")
    messages = _with_names([message.for_template() for message in request.messages])
    variables, use = template_variables(request), request.tool_use
    if not chat.native:
        messages = in_words(messages, chat.calls, use, chat.takes_system)
    elif use:
        variables["tools"] = [tool.definition for tool in use.shown]
    render = template.render_open if request.continue_final_message else template.render
    try:
        return render(messages, **variables)
    except TemplateFailure as failure:
        raise ApiError(str(failure), param="messages", code="template_error") from failure


def template_variables(request: ChatRequest) -> dict[str, Any]:
    """The chat template's variables in ``request``, with vLLM's meaning of ``reasoning_effort``."""
    variables: dict[str, Any] = dict(request.chat_template_kwargs or {})
    if request.add_generation_prompt is not None:
        variables["add_generation_prompt"] = request.add_generation_prompt
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
        variables.setdefault("enable_thinking", request.reasoning_effort != "none")
    return variables


def _with_names(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``messages``, the results of tools with the name of the tool, for templates with a place for the name."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return messages
