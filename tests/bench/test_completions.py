"""Shared parts of the benchmark's small servers: request checks and stream events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from optkit.bench.completions import CompletionEvents, check

BODY = {"prompt": [1, 2], "max_tokens": 3, "stream": True, "ignore_eos": True, "temperature": 0}


def decode(ids: list[int]) -> str:
    """UTF-8 text of ``ids`` as bytes; a broken character becomes U+FFFD."""
    return bytes(ids).decode("utf-8", errors="replace")


def data(event: str) -> dict[str, Any]:
    """The JSON of an event."""
    return json.loads(event.removeprefix("data: "))


def test_check_gives_prompt_and_length_when_the_body_is_supported() -> None:
    assert check(BODY) == ([1, 2], 3)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": "text"}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stream": False}, "stream"),
        ({"ignore_eos": None}, "ignore_eos"),
        ({"temperature": 0.5}, "greedily"),
    ],
)
def test_check_names_the_field_when_the_body_is_not_supported(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        check(BODY | change)


def test_check_raises_when_the_body_is_no_object() -> None:
    with pytest.raises(ValueError, match="prompt"):
        check([1])


def test_tokens_holds_a_broken_character_until_it_is_complete() -> None:
    text = "aé!".encode()
    events = CompletionEvents("tiny", decode, prompt_tokens=2, max_tokens=len(text))
    pieces = [data(events.tokens([byte]))["choices"][0] for byte in text]
    assert [piece["text"] for piece in pieces] == ["a", "", "é", "!"]
    assert [piece["finish_reason"] for piece in pieces] == [None, None, None, "length"]


def test_tokens_shows_a_broken_character_when_the_answer_is_finished() -> None:
    events = CompletionEvents("tiny", decode, prompt_tokens=2, max_tokens=1)
    assert data(events.tokens(["é".encode()[0]]))["choices"][0]["text"] == "\ufffd"


def test_end_is_a_usage_event_and_done() -> None:
    events = CompletionEvents("tiny", decode, prompt_tokens=2, max_tokens=3)
    events.tokens([97, 98, 99])
    usage, done = events.end()
    assert data(usage)["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert data(usage)["choices"] == []
    assert done == "data: [DONE]\n\n"
