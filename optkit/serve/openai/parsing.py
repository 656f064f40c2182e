"""JSON bodies become requests: the checks of ``protocol``, checks of fields against each other, and clear errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from optkit.serve.http.errors import ApiError, printable, unsupported
from optkit.serve.http.json_body import parse_object
from optkit.serve.openai.fields import MAX_BEAMS, MAX_CHOICES
from optkit.serve.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest, StreamOptions
from optkit.serve.openai.unsupported import HARMLESS, INERT, refuse_unsupported

log = logging.getLogger("optkit.serve")

AS_OBJECT = re.compile(r"Input should be a valid dictionary( or instance of \w+)?")  # pydantic's words

Body = TypeVar("Body", bound=GenerationRequest)
Model = TypeVar("Model", bound=BaseModel)


def parse_request(kind: type[Body], body: bytes) -> Body:
    """The request in a JSON ``body``, checked.

    Raises:
        ApiError: 400; for a wrong field, with the name.
    """
    return checked_request(kind, parse_object(body))


def checked_request(kind: type[Body], data: dict[str, Any]) -> Body:
    """The request with the fields ``data``, checked.

    Raises:
        ApiError: 400; for a wrong field, with the name.
    """
    refuse_unsupported(data, kind.model_fields)
    request = request_from(kind, data)
    if unknown := sorted(set(request.model_extra or {}) - INERT.keys() - HARMLESS):
        log.info("ignoring unknown fields: %s", printable(", ".join(unknown)))
    return request


def request_from(kind: type[Body], data: Mapping[str, Any]) -> Body:
    """``data`` as a request whose fields fit together.

    Raises:
        ApiError: 400, with the wrong field.
    """
    request = checked(kind, data)
    _check_together(request)
    return request


def checked(kind: type[Model], data: Mapping[str, Any]) -> Model:
    """``data`` as a ``kind``.

    Raises:
        ApiError: 400, with the wrong field.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _explain(error) from None


def _check_together(request: GenerationRequest) -> None:
    """Check fields against each other."""
    if request.stream_options and not request.stream:
        raise _invalid("stream_options", "'stream_options' needs 'stream': true")
    if (
        request.ttft_details
        and request.stream
        and not (request.stream_options or StreamOptions()).include_usage
    ):
        raise _invalid("ttft_details", "they are part of the usage: a stream needs 'include_usage': true")
    if request.num_choices < request.num_returned:
        raise _invalid("best_of", "'best_of' must be at least 'n'")
    if request.is_ranked and request.stream:
        raise _invalid("best_of", "a stream cannot rank its answers: 'best_of' must equal 'n'")
    if request.spaces_between_special_tokens is False and request.skip_special_tokens is False:
        message = "special tokens are written as the tokenizer writes them, with its spaces or without"
        raise unsupported("spaces_between_special_tokens", message)
    num_prompts = len(request.prompt) if isinstance(request, CompletionRequest) else 1
    if num_prompts * request.num_choices > MAX_CHOICES:
        field = "best_of" if request.is_ranked else "n"
        raise _invalid(field, f"at most {MAX_CHOICES} choices in one request: prompts times n")
    if isinstance(request, ChatRequest):
        _check_chat(request)
    if request.use_beam_search:
        _check_beam_search(request)
    elif request.length_penalty not in (None, 1):
        raise _invalid("length_penalty", "'length_penalty' needs 'use_beam_search': true")


# Fields that change probabilities or choose at random, and their values without effect. Beams are ranked by the model's
# own probabilities.
WITHOUT_BEAMS: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ((),),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "echo": (False,),
    "rolling_window": (0,),
}


def _check_beam_search(request: GenerationRequest) -> None:
    if request.best_of not in (None, request.num_returned):
        raise _invalid("best_of", "beam search has 'n' beams: 'best_of' must equal 'n'")
    if request.num_choices > MAX_BEAMS:
        raise _invalid("n", f"beam search has at most {MAX_BEAMS} beams")
    if request.requested_max_tokens == 0:
        raise _invalid("max_tokens", "beam search needs at least one token")
    for name, inert in WITHOUT_BEAMS.items():
        value = getattr(request, name, None)
        if value is not None and value not in inert:
            raise unsupported(name, f"'{name}' is not supported together with 'use_beam_search'")
    if named := request.constraint:
        raise unsupported(named.param, "answers of a beam search can't be constrained")
    use = request.tool_use if isinstance(request, ChatRequest) else None
    if use and use.is_constrained:
        name = "tool_choice" if use.required else "tools"
        raise unsupported(
            name, "calls of a beam search can't be constrained: 'tool_choice' must be 'auto' or 'none'"
        )


def _check_chat(request: ChatRequest) -> None:
    use = request.tool_use  # checks the choice
    if request.top_logprobs and not request.logprobs:
        raise _invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true")
    if request.continue_final_message:
        if request.add_generation_prompt:
            message = "'continue_final_message' and 'add_generation_prompt' exclude each other"
            raise _invalid("continue_final_message", message)
        if request.messages[-1].role != "assistant" or not request.messages[-1].content.strip():
            message = "'continue_final_message' needs a last message of the assistant with text"
            raise _invalid("continue_final_message", message)
        if use and use.required:
            message = "'continue_final_message' and a required tool call exclude each other"
            raise _invalid("continue_final_message", message)


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(message, param=param, code="invalid_value")


def _explain(error: ValidationError) -> ApiError:
    """The first problem, with the field and the rule and nothing else."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = [str(part) for part in first["loc"]]
    if path[:1] == ["tool_choice"]:
        del path[1:2]  # pydantic's tag of a union, which no request has
    param = path[0] if path else None
    where = ".".join(path[:4])
    message = AS_OBJECT.sub("must be an object", first["msg"].removeprefix("Value error, "))
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return ApiError(f"'{printable(where, 100)}': {printable(message, 200)}", param=param, code=code)
