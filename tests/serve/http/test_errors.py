"""Errors in the shape that OpenAI's clients expect."""

from __future__ import annotations

from tests.support.http_calls import CHAT
from tests.support.serve_fakes import (
    call,
    tiny_app,
)


def test_wrong_paths_and_methods_have_the_error_body() -> None:
    app = tiny_app()
    for method, path, status in (("GET", "/nope", 404), ("GET", CHAT, 405), ("GET", "/docs", 404)):
        answer = call(app, method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
