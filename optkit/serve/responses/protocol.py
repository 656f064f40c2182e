"""Requests of ``/v1/responses``: checked, then turned into chat requests.

The server stores no answers. A request for storage, or with a reference to something stored, is 400 and names the field
(``REFUSED``); an absent ``store`` means false here, and the answer says so.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema

from optkit.serve.http.errors import ApiError, printable, unsupported
from optkit.serve.http.json_body import parse_object
from optkit.serve.openai.fields import MAX_LOGPROBS, MAX_MESSAGES, Count
from optkit.serve.openai.parsing import checked, request_from
from optkit.serve.openai.protocol import ChatRequest
from optkit.serve.openai.tool_fields import MAX_TOOLS, ArgumentsSchema, ToolName
from optkit.serve.openai.unsupported import is_one_of
from optkit.serve.responses.items import messages_of

log = logging.getLogger("optkit.serve")

# Field -> values without effect.
REFUSED: dict[str, tuple[Any, ...]] = {
    "store": (None, False),
    "background": (None, False),
    "previous_response_id": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "truncation": (None, "disabled"),
    "context_management": (None, []),
    "moderation": (None,),
}
HARMLESS = frozenset(
    [
        *("service_tier", "safety_identifier", "access_programs"),  # for the operator of the service
        *(
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
        ),  # prefixes are found by content
        "cache",  # read by the response cache
        *("max_tool_calls", "image"),  # about tools of the service, which are refused
    ]
)
LOGPROBS = "message.output_text.logprobs"
PARAMS = {  # the fields of chat requests and their names here
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}


def _items(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise ValueError("must be a string or a list of items")
    if len(value) > MAX_MESSAGES:
        raise ValueError(f"at most {MAX_MESSAGES} items in one request")
    return value


ITEMS = {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": {"type": "object"}}
Items = Annotated[
    str | list[dict[str, Any]],
    BeforeValidator(_items),
    WithJsonSchema({"anyOf": [{"type": "string"}, ITEMS]}),
]


class FlatFunction(BaseModel):
    """A tool, with all fields on a single level."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: ArgumentsSchema = None
    strict: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        fields = {"description": self.description, "parameters": self.parameters, "strict": self.strict}
        given = {name: value for name, value in fields.items() if value is not None}
        return {"type": "function", "function": {"name": self.name, **given}}


class FlatName(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    name: ToolName

    def as_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}


class FlatAllowed(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatName], Field(min_length=1, max_length=MAX_TOOLS)]

    def as_chat(self) -> dict[str, Any]:
        names = [tool.as_chat() for tool in self.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": names}}


def _kind_of_choice(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return "word"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in ("function", "allowed_tools") else None


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"] | None, Tag("word")]
    | Annotated[FlatName, Tag("function")]
    | Annotated[FlatAllowed, Tag("allowed_tools")],
    Discriminator(
        _kind_of_choice,
        custom_error_type="tool_choice",
        custom_error_message="must be 'none', 'auto', 'required', or an object of type 'function' or 'allowed_tools'",
    ),
]


class TextOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(BaseModel):
    """Effort of reasoning; the answer has the whole reasoning, and no summary."""

    model_config = ConfigDict(strict=True, extra="allow")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponsesRequest(BaseModel):
    """Body of ``POST /v1/responses``."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(max_length=512)] | None = None
    input: Items
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: (
        Annotated[list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], Field()]
        | None
    ) = None
    tools: Annotated[list[FlatFunction], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None

    @property
    def shows_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def chat_fields(self) -> dict[str, Any]:
        """The fields of the chat request.

        Raises:
            ApiError: 400, an input item without a meaning here.
        """
        try:
            messages = messages_of(self.input)
        except ValueError as error:
            raise ApiError(printable(str(error)), param="input", code="invalid_value") from None
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        choice = self.tool_choice
        same = ("model", "temperature", "top_p", "stream", "user", "parallel_tool_calls")
        found: dict[str, Any] = {name: getattr(self, name) for name in same}
        found |= {"messages": messages, "max_completion_tokens": self.max_output_tokens}
        found["tools"] = [tool.as_chat() for tool in self.tools or ()] or None
        found["tool_choice"] = choice.as_chat() if isinstance(choice, BaseModel) else choice
        if self.shows_logprobs:
            found |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.text and self.text.format:
            found["response_format"] = _response_format(self.text.format)
        if self.reasoning:
            found["reasoning_effort"] = self.reasoning.effort
        return found


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's format of chat requests, where the fields of a schema have an object of their own."""
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: given[name] for name in given if name != "type"}}


def parse_responses(body: bytes) -> tuple[ResponsesRequest, ChatRequest]:
    """The request in ``body``, and the chat request of the same meaning.

    Raises:
        ApiError: 400; for a wrong field, with the name in the body.
    """
    data = parse_object(body)
    for name, inert in REFUSED.items():
        if name in data and not is_one_of(data[name], inert):
            raise unsupported(
                name, f"'{name}' is not supported: the server stores nothing and shortens nothing"
            )
    request = checked(ResponsesRequest, data)
    if unknown := sorted(set(request.model_extra or {}) - HARMLESS - REFUSED.keys()):
        log.info("ignoring unknown fields: %s", printable(", ".join(unknown)))
    try:
        return request, request_from(ChatRequest, request.chat_fields())
    except ApiError as error:
        error.rename(PARAMS)
        raise
