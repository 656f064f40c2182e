"""Bodies of ``POST /v1/cache/warm``: a text, token ids or a conversation, and what becomes of the KV."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from optkit.serve.http.errors import ApiError
from optkit.serve.http.json_body import parse_object
from optkit.serve.openai.fields import MAX_INT
from optkit.serve.openai.parsing import checked, checked_request
from optkit.serve.openai.protocol import ChatRequest

MAX_TOKENS = 1 << 20
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Ids = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT)]], Field(min_length=1, max_length=MAX_TOKENS)]


class WarmText(BaseModel):
    """A text or token ids to compute before the first request."""

    model_config = ConfigDict(strict=True, extra="forbid")

    prompt: Annotated[str, Field(min_length=1)] | Ids
    model: Annotated[str, Field(max_length=512)] | None = None
    add_special_tokens: bool = True
    cache_salt: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    pin: bool = False
    id: Label | None = None
    session: Label | None = None


class WarmChat(ChatRequest):
    """Messages and tools to compute before the first request; fields for sampling have no meaning."""

    pin: bool = False
    id: Label | None = None
    session: Label | None = None


WarmRequest = WarmText | WarmChat


def parse_warm(body: bytes) -> WarmRequest:
    """The request in ``body``; ``messages`` mean a conversation.

    Raises:
        ApiError: 400, with the wrong field.
    """
    data = parse_object(body)
    if "messages" in data and "prompt" in data:
        raise ApiError("give 'prompt' or 'messages', not both", param="messages", code="invalid_value")
    request = checked_request(WarmChat, data) if "messages" in data else checked(WarmText, data)
    if request.session and request.pin:
        message = (
            "a session grows and ends by itself: it can't be pinned; pin the part that stays in another call"
        )
        raise ApiError(message, param="session", code="invalid_value")
    if request.id and not request.pin:
        raise ApiError("'id' names a pin: it needs 'pin': true", param="id", code="invalid_value")
    return request


def param_of(request: WarmRequest) -> str:
    """The field with the prompt."""
    return "messages" if isinstance(request, WarmChat) else "prompt"
