"""One choice: stop strings, stop tokens, and the engine's request that is left early."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.http_calls import CHAT, HELLO, TOKENS, chunks
from tests.support.serve_fakes import FakeEngine, post, tiny_app
from tests.support.tiny_tokenizer import TEXT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["you doing", ["nowhere", "re, h"], "The end is near."])
def test_stop_strings_never_leak_and_abort_the_engine(stop: Any, stream: bool) -> None:
    engine = FakeEngine()
    request = {**HELLO, "stop": stop}
    stops = [stop] if isinstance(stop, str) else stop
    want = TEXT[: min(TEXT.index(word) for word in stops if word in TEXT)]
    if stream:
        got = chunks(request, engine)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in got)
        assert got[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        [choice] = post(tiny_app(engine), CHAT, request).json()["choices"]
        text = choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
    assert text == want
    assert len(engine.aborted) == 1


def test_min_tokens_lets_early_stop_strings_pass() -> None:
    [choice] = post(tiny_app(), CHAT, {**HELLO, "stop": "e", "min_tokens": TOKENS - 1}).json()["choices"]
    assert choice["message"]["content"].startswith("Hello there")
