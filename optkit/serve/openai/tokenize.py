"""``/tokenize`` and ``/detokenize``, with vLLM's fields: token ids of texts or conversations, and back."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from optkit.serve.http.errors import ApiError
from optkit.serve.http.json_body import parse_object
from optkit.serve.openai.fields import Natural
from optkit.serve.openai.parsing import checked
from optkit.serve.openai.prompts import PromptReader
from optkit.serve.openai.protocol import ChatRequest

MAX_TOKENS = 1 << 20


class TokenizeRequest(BaseModel):
    """Body of ``POST /tokenize`` with a text."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(max_length=512)] | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatRequest):
    """Body of ``POST /tokenize`` with a conversation; fields for sampling have no meaning."""

    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """Body of ``POST /detokenize``."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(max_length=512)] | None = None
    tokens: Annotated[list[Natural], Field(max_length=MAX_TOKENS)]


def parse_tokenize(body: bytes) -> TokenizeRequest | TokenizeChatRequest:
    """The request in ``body``; ``messages`` mean a conversation.

    Raises:
        ApiError: 400, with the wrong field.
    """
    data = parse_object(body)
    if "messages" in data and "prompt" in data:
        raise ApiError("give 'prompt' or 'messages', not both", param="messages", code="invalid_value")
    return checked(TokenizeChatRequest, data) if "messages" in data else checked(TokenizeRequest, data)


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """The request in ``body``.

    Raises:
        ApiError: 400, with the wrong field.
    """
    return checked(DetokenizeRequest, parse_object(body))


async def tokenize(prompts: PromptReader, request: TokenizeRequest | TokenizeChatRequest) -> dict[str, Any]:
    """The answer of ``/tokenize``; a text longer than the context is tokenized all the same."""
    if isinstance(request, TokenizeRequest):
        ids = await prompts.token_ids(request.prompt, request.add_special_tokens)
    else:
        ids = await prompts.chat_ids(request)
    strings = [prompts.tokenizer.token(token) for token in ids] if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": prompts.max_model_len, "tokens": ids, "token_strs": strings}


async def detokenize(prompts: PromptReader, request: DetokenizeRequest) -> dict[str, Any]:
    """The answer of ``/detokenize``, special tokens included."""
    prompts.check_ids("tokens", request.tokens)
    return {"prompt": await prompts.text_of(request.tokens)}
