"""Requests of ``/v1/messages`` and ``/v1/messages/count_tokens``: checked, then turned into chat requests.

Fields of Anthropic without influence on an answer here (``HARMLESS``) are accepted; fields for features without an
implementation are 400; unknown fields are accepted with a line in the log.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from optkit.serve.anthropic.fields import (
    Blocks,
    Choice,
    CustomTools,
    OutputConfig,
    StopSequences,
    Thinking,
    Turn,
    text_of_blocks,
)
from optkit.serve.http.errors import ApiError, printable, unsupported
from optkit.serve.http.json_body import parse_object
from optkit.serve.openai.fields import MAX_INT, MAX_MESSAGES, Count
from optkit.serve.openai.parsing import checked, request_from
from optkit.serve.openai.protocol import ChatRequest

log = logging.getLogger("optkit.serve")

# Field -> values without effect.
REFUSED: dict[str, tuple[Any, ...]] = {"container": (None,), "mcp_servers": (None, [])}
HARMLESS = frozenset(
    [
        *(
            "metadata",
            "service_tier",
            "speed",
            "inference_geo",
            "user_profile_id",
            "workspace_id",
        ),  # for the operator
        *("cache_control", "context_management", "diagnostics", "betas"),  # prefixes are found by content
        "cache",  # read by the response cache
    ]
)
PARAMS = {  # the fields of chat requests and their names here
    "stop": "stop_sequences",
    "continue_final_message": "messages",
    "parallel_tool_calls": "tool_choice",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
}


class CountTokensRequest(BaseModel):
    """Body of ``POST /v1/messages/count_tokens``."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(max_length=512)] | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Blocks | None = None
    tools: CustomTools | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def chat_fields(self) -> dict[str, Any]:
        """The given fields, as fields of a chat request.

        Raises:
            ApiError: 400, a content block without a meaning here.
        """
        found: dict[str, Any] = {"model": self.model, "messages": self._messages()}
        if self.tools:
            found["tools"] = [tool.as_chat() for tool in self.tools]
        if self.tool_choice:
            found["tool_choice"] = self.tool_choice.as_chat()
            found["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.thinking and self.thinking.type in ("enabled", "disabled"):
            found["chat_template_kwargs"] = {"enable_thinking": self.thinking.type == "enabled"}
        if self.output_config:
            found |= {"reasoning_effort": self.output_config.effort}
            if self.output_config.format is not None:
                found["response_format"] = _response_format(self.output_config.format)
        if self.messages[-1].role == "assistant":
            found["continue_final_message"] = True
        return found

    def _messages(self) -> list[dict[str, Any]]:
        found = []
        try:
            if self.system:
                found.append({"role": "system", "content": text_of_blocks(self.system)})
        except ValueError as error:
            raise ApiError(printable(str(error)), param="system", code="invalid_value") from None
        for i, turn in enumerate(self.messages):
            try:
                found += turn.as_chat()
            except ValueError as error:
                message = f"'messages.{i}': {printable(str(error))}"
                raise ApiError(message, param="messages", code="invalid_value") from None
        return found


class MessagesRequest(CountTokensRequest):
    """Body of ``POST /v1/messages``."""

    max_tokens: Count
    stop_sequences: StopSequences = []
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    stream: bool = False

    def chat_fields(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        own = {name: getattr(self, name) for name in names}
        return super().chat_fields() | own | {"stop": self.stop_sequences}


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's format of chat requests: with a name, and an object around the schema."""
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given.get("schema")}}


def parse_messages(body: bytes) -> ChatRequest:
    """The body of ``/v1/messages`` as a chat request.

    Raises:
        ApiError: 400; for a wrong field, with the name at Anthropic.
    """
    return _parse(MessagesRequest, body)


def parse_count(body: bytes) -> ChatRequest:
    """The body of ``/v1/messages/count_tokens`` as a chat request.

    Raises:
        ApiError: 400; for a wrong field, with the name at Anthropic.
    """
    return _parse(CountTokensRequest, body)


def _parse(kind: type[CountTokensRequest], body: bytes) -> ChatRequest:
    data = parse_object(body)
    for name, inert in REFUSED.items():
        if data.get(name) not in inert:
            raise unsupported(name)
    request = checked(kind, data)
    if unknown := sorted(set(request.model_extra or {}) - HARMLESS - REFUSED.keys()):
        log.info("ignoring unknown fields: %s", printable(", ".join(unknown)))
    try:
        return request_from(ChatRequest, request.chat_fields()).filling_context()
    except ApiError as error:
        error.rename(PARAMS)
        raise
