"""The requests of OpenAI's chat and completion endpoints, checked before anything is allocated.

Three kinds of fields, three answers:

- **supported**: typed and bounded below; a wrong value is 400 and names the field;
- **unsupported meaning** (tools, logprobs, several answers, ...): 400 unless the value asks for nothing,
  because dropping it silently would answer another question than the one asked;
- **unknown**: accepted with a log line, because clients send private extras and must keep working.

Beyond OpenAI: vLLM's ``top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids``.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from optkit.runtime.types import SamplingParams
from optkit.serve.api_error import ApiError, printable, unsupported

log = logging.getLogger("optkit.serve")

MAX_PROMPTS = 64
MAX_MESSAGES = 2048
MAX_STOPS, MAX_STOP_CHARS = 4, 256
MAX_INT = 2**31 - 1

# Field -> values that ask for nothing.
INERT: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "logit_bias": (None, {}),
    "echo": (None, False),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "chat_template": (None,),
    "prompt_embeds": (None,),
    "documents": (None, []),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "add_special_tokens": (None,),
    "skip_special_tokens": (None, True),
    "include_stop_str_in_output": (None, False),
    "use_beam_search": (None, False),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "truncate_prompt_tokens": (None,),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
}

Count = Annotated[int, Field(ge=1, le=MAX_INT)]
Natural = Annotated[int, Field(ge=0, le=MAX_INT)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Scalar = Annotated[str, Field(max_length=256)] | int | float | bool | None


def _stop_list(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise ValueError(f"must be a string or a list of at most {MAX_STOPS} strings")
    if not all(isinstance(stop, str) and 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"each stop string has 1 to {MAX_STOP_CHARS} characters")
    return stops


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(BaseModel):
    """What chat and completions have in common."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(max_length=512)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stop_list)] = []
    stop_token_ids: Annotated[list[Natural], Field(max_length=64)] | None = None
    min_tokens: Natural | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def token_limit(self) -> int | None:
        """The number of tokens asked for, None for the endpoint's default."""
        return self.max_tokens

    def sampling(self, max_tokens: int, eos_ids: tuple[int, ...]) -> SamplingParams:
        """The engine's view of this request; end-of-sequence ids are ordinary stop ids to it."""
        stops = tuple(self.stop_token_ids or ()) + (() if self.ignore_eos else eos_ids)
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            seed=self.seed,
            min_tokens=self.min_tokens or 0,
            stop_token_ids=stops,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
        )


def _content(value: Any) -> Any:
    """Message content as one string: text parts are joined by newlines, as vLLM does."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise ValueError("must be a string or a list of content parts")
    if any(part.get("type") != "text" for part in value):
        raise ValueError("only text content parts are supported")
    texts = [part.get("text") for part in value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a text part needs a 'text' string")
    return "\n".join(texts)


class Message(BaseModel):
    """One turn; the template sees ``role``, ``content`` and, when given, ``name``."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)] = ""
    name: Annotated[str, Field(max_length=256)] | None = None

    def for_template(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content} | ({"name": self.name} if self.name else {})


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    chat_template_kwargs: Annotated[dict[str, Scalar], Field(max_length=16)] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """The four shapes of ``prompt`` as a list of texts or a list of id lists."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, token ids or a list of token id lists")
    if set(map(type, value)) == {int}:
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts in one request")
    if set(map(type, value)) == {str}:
        return value
    if set(map(type, value)) == {list} and all(set(map(type, ids)) <= {int} for ids in value):
        return value
    raise ValueError("must be a string, a list of strings, token ids or a list of token id lists")


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]


Body = TypeVar("Body", bound=GenerationRequest)


def parse_request(kind: type[Body], data: dict[str, Any]) -> Body:
    """Check ``data`` against ``kind``.

    Raises:
        ApiError: 400 that names the field.
    """
    _refuse_unsupported(data)
    try:
        request = kind.model_validate(data)
    except ValidationError as error:
        raise _explain(error) from None
    if request.stream_options and not request.stream:
        raise ApiError("'stream_options' needs 'stream': true", param="stream_options", code="invalid_value")
    if unknown := sorted(set(request.model_extra or {}) - set(INERT)):
        log.info("ignoring unknown fields: %s", printable(", ".join(unknown)))
    return request


def _refuse_unsupported(data: dict[str, Any]) -> None:
    for name, inert in INERT.items():
        if name in data and not any(
            type(data[name]) is type(value) and data[name] == value for value in inert
        ):
            raise unsupported(name)
    messages = data.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            _refuse_in_message(message)


def _refuse_in_message(message: dict[str, Any]) -> None:
    if (
        message.get("role") in ("tool", "function")
        or message.get("tool_calls")
        or message.get("function_call")
    ):
        raise unsupported("messages", "tool calls are not supported")
    parts = message.get("content")
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict) and part.get("type") not in ("text", None):
            raise unsupported("messages", "only text content parts are supported")


def _explain(error: ValidationError) -> ApiError:
    """The first problem, in words that show nothing but the field and the rule."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = [str(part) for part in first["loc"]]
    param = path[0] if path else None
    where = ".".join(path[:4])
    message = first["msg"].removeprefix("Value error, ")
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return ApiError(f"'{printable(where, 100)}': {printable(message, 200)}", param=param, code=code)
