"""The page at /demo: off by default, one file, and its calls are calls that the server takes."""

from __future__ import annotations

import re

import pytest

from optkit.serve.demo import page, policy
from tests.support.serve_fakes import SteppedEngine, call, events, post, tiny_app


def test_the_page_is_off_by_default() -> None:
    assert call(tiny_app(), "GET", "/demo").status_code == 404


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_the_page_is_one_file_with_a_strict_policy(keys: tuple[str, ...]) -> None:
    app = tiny_app(demo=True, api_keys=keys)
    answer = call(app, "GET", "/demo")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "class TypingAhead" in answer.text and "/* typing-ahead.js */" not in answer.text
    assert not re.search(r"(src|href)=|https?://(?!localhost)", answer.text)
    assert answer.headers["content-security-policy"] == policy(page())
    head = call(app, "HEAD", "/demo")  # as every path with GET
    assert (head.status_code, head.headers["content-length"]) == (200, answer.headers["content-length"])
    assert "'none'" in policy(page()) and "unsafe-eval" not in policy(page())
    if keys:
        assert call(app, "GET", "/v1/cache/warm").status_code == 401


def test_the_calls_of_the_page_are_served() -> None:
    """Every path in the script, with the fields that the script sends."""
    engine = SteppedEngine()
    app = tiny_app(engine, demo=True)
    assert set(re.findall(r'"(/v1/[a-z/]+)"', page())) == {"/v1/cache/warm", "/v1/chat/completions"}
    conversation = [{"role": "user", "content": "hello there, what is this all about " * 3}]
    told = post(app, "/v1/cache/warm", {"messages": conversation, "session": "typing-a1b2c3"}).json()
    assert told["status"] == "warm" and told["warm_tokens"] > 0
    fields = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 64, "temperature": 0}
    text = post(app, "/v1/chat/completions", {"messages": conversation, **fields}).text
    assert events(text)[-1] == "[DONE]" and '"cached_tokens":' in text and '"delta":{"content":' in text
