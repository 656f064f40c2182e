"""Arguments of a loaded model's functions as the fields of requests."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from optkit.errors import UserError
from optkit.serve.openai.protocol import CompletionRequest, GenerationRequest

TRANSPORT = frozenset(
    [
        *("model", "stream", "stream_options", "user", "request_id", "ttft_details", "return_token_ids"),
        *("return_tokens_as_token_ids", "prompt", "messages", "echo", "logprobs", "top_logprobs", "priority"),
    ]
)  # fields of HTTP requests that are no options here, or have an argument of their own


def sizes(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` with sizes such as ``"512MiB"`` as bytes, and paths as text."""
    from optkit.recipe.schema import parse_bytes

    found = {}
    for name, value in options.items():
        try:
            found[name] = parse_bytes(value) if name.endswith("_bytes") else value
        except ValueError as error:
            raise UserError(str(error), where=name, fix="write it as 512MiB or 1GiB") from error
        if isinstance(value, os.PathLike):
            found[name] = os.fspath(value)
    return found


def known_options(kind: type[GenerationRequest]) -> set[str]:
    """The fields of a request that are options of ``generate`` or ``chat``."""
    return kind.model_fields.keys() - TRANSPORT


def as_json(value: Any) -> Any:
    """``value`` as JSON has it: tuples are lists, mappings have text as keys."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, list | tuple) else value


def as_prompts(prompts: Any) -> tuple[list[str | list[int]], bool]:
    """The prompts as a list, and True where a single one was given.

    Raises:
        UserError: neither text nor token ids.
    """
    if isinstance(prompts, str):
        return [prompts], True
    found = list(prompts) if isinstance(prompts, Sequence) else []
    if found and all(isinstance(item, int) and not isinstance(item, bool) for item in found):
        return [found], True
    if all(isinstance(item, str) for item in found) and isinstance(prompts, Sequence):
        return found, False
    if found and all(isinstance(item, Sequence) and all(isinstance(i, int) for i in item) for item in found):
        return [list(item) for item in found], False
    raise UserError(f"a prompt is a text or a list of token ids, got {prompts!r:.60}", where="prompts")


def is_messages(value: Any) -> bool:
    """True for a conversation: a list of mappings."""
    listed = isinstance(value, Sequence) and not isinstance(value, str) and bool(value)
    return listed and all(isinstance(message, Mapping) for message in value)


def as_conversations(messages: Any) -> tuple[list[Sequence[Mapping[str, Any]]], bool]:
    """The conversations as a list, and True where a single one was given.

    Raises:
        UserError: no messages.
    """
    if isinstance(messages, str):
        return [[{"role": "user", "content": messages}]], True
    if is_messages(messages):
        return [messages], True
    if isinstance(messages, Sequence) and messages and all(map(is_messages, messages)):
        return list(messages), False
    fix = "as in [{'role': 'user', 'content': 'Hello'}]"
    raise UserError(f"a conversation is a list of messages, got {messages!r:.60}", where="messages", fix=fix)


def prompt_text(request: GenerationRequest) -> str:
    """The text that was given as a prompt; empty for token ids and messages."""
    given = request.prompt[0] if isinstance(request, CompletionRequest) else ""
    return given if isinstance(given, str) else ""
