"""Arguments of a loaded model's functions as the fields of requests."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from optkit.errors import UserError
from optkit.serve.openai.protocol import CompletionRequest, GenerationRequest
from optkit.untrusted_json import is_text

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
    check_texts(prompts, "prompts")
    if isinstance(prompts, str):
        return [prompts], True
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, bytes | bytearray)
    found = list(prompts) if is_list else []
    if found and all(isinstance(item, int) and not isinstance(item, bool) for item in found):
        return [found], True
    if all(isinstance(item, str) for item in found) and is_list:
        return found, False
    if found and all(map(_is_ids, found)):
        return [list(item) for item in found], False
    raise UserError(f"a prompt is a text or a list of token ids, got {prompts!r:.60}", where="prompts")


def _is_ids(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, bytes | bytearray)
    return is_list and all(isinstance(item, int) for item in value)


def check_texts(value: Any, where: str) -> None:
    """Refuse a text with half a surrogate pair, at any depth of ``value``: it has no bytes, so it has no tokens.

    Raises:
        UserError: with ``where``.
    """
    if isinstance(value, str):
        if not is_text(value):
            fix = "replace them: text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
            raise UserError("a text has half a surrogate pair", where=where, fix=fix)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_texts(key, where)
            check_texts(item, where)
    elif isinstance(value, list | tuple) and not (value and isinstance(value[0], int)):
        for item in value:
            check_texts(item, where)


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
