"""Calls of the tiny server that several test files share."""

from __future__ import annotations

import json
from typing import Any

from tests.support.serve_fakes import FakeEngine, events, post, tiny_app
from tests.support.tiny_tokenizer import TEXT, tiny_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


TOKENS = len(tiny_tokenizer().encode(TEXT))


COUNTED = TOKENS + 1  # the end token is counted too


def chunks(body: dict[str, Any], engine: FakeEngine | None = None, path: str = CHAT) -> list[dict[str, Any]]:
    answer = post(tiny_app(engine), path, {**body, "stream": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *data, done = events(answer.text)
    assert done == "[DONE]"
    return [json.loads(item) for item in data]
