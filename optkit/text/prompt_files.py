"""Prompts in files: a system prompt as text, or the first messages of a conversation as JSON; and the tokens."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from optkit.errors import UserError
from optkit.text.chat_template import TemplateFailure
from optkit.text.stable_prefix import common_prefix, endings, stable_prefix
from optkit.text.tokenizer import Tokenizer

MAX_PROMPT_BYTES = 4 << 20
ROLES = ("system", "developer", "user", "assistant")
FORM = 'write a list of messages: [{"role": "system", "content": "..."}, ...]'
NEXT_TURNS = ("a", "1")


class KnownPrompt(NamedTuple):
    """A prompt: ``messages`` of a conversation, or none for the chat template's own beginning."""

    name: str
    messages: Sequence[dict[str, str]]


def read_prompts(files: Sequence[str]) -> list[KnownPrompt]:
    """The prompts in ``files``, by unlike names.

    Raises:
        UserError: a file can't be read, or is no list of messages.
    """
    found = [KnownPrompt(Path(file).name, read_messages(Path(file))) for file in files]
    names = [prompt.name for prompt in found]
    numbers = [f"{number}-" * (names.count(name) > 1) for number, name in enumerate(names, 1)]
    if len(set(map(operator.add, numbers, names))) < len(names):  # a file has the name that another was given
        numbers = [f"{number}-" for number in range(1, len(names) + 1)]
    return [prompt._replace(name=number + prompt.name) for number, prompt in zip(numbers, found, strict=True)]


def read_messages(file: Path) -> list[dict[str, str]]:
    """The messages in ``file``: of a .json file, else the text as a system prompt.

    Raises:
        UserError: as ``read_prompts``.
    """
    try:
        if file.stat().st_size > MAX_PROMPT_BYTES:
            raise UserError(f"the prompt is larger than {MAX_PROMPT_BYTES >> 20} MiB", where=str(file))
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"the prompt can't be read: {reason}", where=str(file)) from error
    if not text.strip():
        raise UserError("the prompt is empty", where=str(file))
    if file.suffix != ".json":
        return [{"role": "system", "content": text}]
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError("it is not valid JSON", where=str(file), fix=FORM) from error
    if not (isinstance(data, list) and data and all(map(is_message, data))):
        raise UserError("it is no list of messages", where=str(file), fix=FORM)
    return data


def is_message(data: Any) -> bool:
    """True for a message with a known role and a text."""
    known = isinstance(data, dict) and set(data) == {"role", "content"}
    return known and data["role"] in ROLES and isinstance(data["content"], str)


def prefix_ids(tokenizer: Tokenizer, prompt: KnownPrompt) -> list[int]:
    """Token ids at the beginning of every request after ``prompt``.

    Without a chat template the texts of the messages begin a completion.

    Raises:
        UserError: the chat template refuses the messages.
    """
    messages, template = list(prompt.messages), tokenizer.chat_template
    if template is None:
        text = "".join(message["content"] for message in messages)
        return stable_prefix([tokenizer.encode(end) for end in endings(text)]) if text else []
    turns: list[list[dict[str, str]]] = [[{"role": "user", "content": text}] for text in NEXT_TURNS]
    if messages and messages[-1]["role"] == "user":
        turns = [[]]
    try:
        texts = [template.render(messages + end) for end in turns]
    except TemplateFailure as failure:
        raise UserError(f"the chat template refuses the messages: {failure}", where=prompt.name) from failure
    return common_prefix([tokenizer.encode(text, add_special_tokens=False) for text in texts])
