"""A request that does not fit the context is refused in the words that clients look for."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.serve_fakes import post, tiny_app

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# What clients search a 400 for to tell an overflow from other errors, by client. Matched without regard to case.
PHRASES = {
    "litellm (aider, OpenHands, crewAI through it)": r"this model's maximum context length is",
    "crewAI": r"maximum context length",
    "pi and what is built on it": r"maximum context length is \d+ tokens",
    "Cline, Roo Code": r"context length",
    "clients of OpenAI's error code": r"context_length_exceeded",
    "clients that read the numbers": r"maximum context length is (\d+) tokens.*?(\d+) tokens",
}
ASKED = (
    r"you requested (?P<total>\d+) tokens \((?P<prompt>\d+) in the \w+, (?P<answer>\d+) in the completion\)"
)
GROQ = r"reduce the length of the messages or completion"


def overflow(path: str, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The error object, and all of its text as the OpenAI client's exception shows it."""
    answer = post(tiny_app(), path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "invalid_request_error"
    return error, str(error)


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


BODIES = [
    (CHAT, chat("Hello", max_tokens=512)),
    (CHAT, chat("Hello", max_completion_tokens=512)),
    (CHAT, chat("a " * 600)),
    (CHAT, chat("x" * 1_000_000)),
    (COMPLETIONS, {"prompt": [1] * 500, "max_tokens": 13}),
    (COMPLETIONS, {"prompt": [1] * 512}),
    (COMPLETIONS, {"prompt": "x" * 1_000_000}),
]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("client", PHRASES)
def test_overflow_has_the_phrase_that_a_client_looks_for(
    client: str, path: str, body: dict[str, Any]
) -> None:
    _, text = overflow(path, body)
    assert re.search(PHRASES[client], text, re.IGNORECASE), text


@pytest.mark.parametrize(("path", "body"), BODIES, ids=range(len(BODIES)))
def test_overflow_is_not_taken_for_a_rate_limit(path: str, body: dict[str, Any]) -> None:
    _, text = overflow(path, body)
    assert not re.search(r"rate[\s_-]*limit|quota|\btpm\b|too many requests", text, re.IGNORECASE)


def test_overflow_numbers_add_up_when_max_tokens_is_too_large() -> None:
    error, text = overflow(COMPLETIONS, {"prompt": [1] * 500, "max_tokens": 13})
    found = re.search(ASKED, text)
    assert found and {name: int(n) for name, n in found.groupdict().items()} == {
        "total": 513,
        "prompt": 500,
        "answer": 13,
    }
    assert "maximum context length is 512 tokens" in text
    assert error["param"] == "prompt"


def test_overflow_of_a_chat_says_messages_as_openai_does() -> None:
    error, text = overflow(CHAT, chat("Hello", max_tokens=512))
    assert error["param"] == "messages"
    assert re.search(GROQ, text)
    found = re.search(ASKED, text)
    assert found and int(found["total"]) == int(found["prompt"]) + int(found["answer"])


def test_overflow_without_max_tokens_names_the_prompt_alone() -> None:
    _, text = overflow(CHAT, chat("a " * 600))
    assert re.search(r"your messages resulted in \d+ tokens", text)
    assert "completion)" not in text
