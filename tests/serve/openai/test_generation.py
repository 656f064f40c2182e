"""One choice: stop strings, stop tokens, and the engine's request that is left early."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from optkit.runtime.types import EngineRequest, FinishReason, TokenOutput
from optkit.serve.app import create_app
from optkit.text.chat_template import ChatTemplate
from optkit.text.tokenizer import Tokenizer
from tests.serve.openai.test_tools import ASK, HERMES_CALL
from tests.support.chat_templates import QWEN, QWEN3
from tests.support.http_calls import CHAT, HELLO, TOKENS, chunks
from tests.support.serve_fakes import FakeEngine, events, post, settings, tiny_app
from tests.support.tiny_tokenizer import TEXT, fast_tokenizer


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


@pytest.mark.parametrize("size", [1, 2, 7])
def test_stop_strings_and_calls_are_found_in_outputs_of_several_tokens(size: int) -> None:
    engine = FakeEngine(f"<think>Hm.</think>Look.\n{HERMES_CALL} STOP more")
    engine.tokens_per_output = size
    body = {**ASK, "stop": ["STOP"]}
    [choice] = post(tiny_app(engine, QWEN3, max_model_len=4096), CHAT, body).json()["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("Look.", "Hm.")
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize(
    ("script", "stop", "content", "num_calls", "reason"),
    [
        (HERMES_CALL, "\n", None, 1, "tool_calls"),
        (HERMES_CALL, '"city"', None, 1, "tool_calls"),
        (f"One.\n\nTwo.\n{HERMES_CALL}", "\n\n", "One.", 0, "stop"),
        (f"Two. STOP {HERMES_CALL}", "STOP", "Two. ", 0, "stop"),
        (f"{HERMES_CALL}\nSo STOP.{HERMES_CALL}", "STOP", "So ", 1, "tool_calls"),
        (f"It is 5 <{HERMES_CALL}", "<b>", "It is 5 <", 1, "tool_calls"),
        ("It is 5 <b", "<b>", "It is 5 <b", 0, "stop"),
    ],
)
def test_stop_strings_end_the_content_and_no_call(
    script: str, stop: str, content: str | None, num_calls: int, reason: str, size: int
) -> None:
    """OpenAI's calls are no text, so a stop string such as a line break must not cut them."""
    engine = FakeEngine(script)
    engine.tokens_per_output = size
    app = tiny_app(engine, QWEN, max_model_len=4096)
    [choice] = post(app, CHAT, {**ASK, "stop": [stop]}).json()["choices"]
    calls = choice["message"].get("tool_calls", [])
    assert (choice["message"]["content"], len(calls), choice["finish_reason"]) == (content, num_calls, reason)
    assert all(json.loads(call["function"]["arguments"]) == {"city": "Oslo"} for call in calls)
    chunks = [
        json.loads(e)["choices"][0]
        for e in events(post(app, CHAT, {**ASK, "stop": [stop], "stream": True}).text)[:-1]
    ]
    assert "".join(c["delta"].get("content") or "" for c in chunks) == (content or "")
    assert chunks[-1]["finish_reason"] == reason


@pytest.mark.parametrize("streams", [False, True])
def test_tags_that_are_special_tokens_reach_the_parser_and_no_others_the_text(streams: bool) -> None:
    """As in vocabularies of Hermes 3: special tokens have no text, but these are the form of a call."""
    fast = FastTokenizer.from_str(fast_tokenizer().to_str())
    tags = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    fast.add_special_tokens([AddedToken(tag, special=True) for tag in tags])
    tokenizer = Tokenizer(fast, ChatTemplate(QWEN3), eos_ids=[fast.token_to_id("<|im_end|>")])
    ids = fast.encode(f"<think>Hm.</think>I <|im_start|>look.{HERMES_CALL}").ids

    class Speaking(FakeEngine):
        async def generate(self, request: EngineRequest) -> AsyncIterator[TokenOutput]:
            for place, token in enumerate(ids, 1):
                end = FinishReason.LENGTH if place == len(ids) else None
                yield TokenOutput(request_id=request.request_id, token_ids=(token,), finish_reason=end)

    app = create_app(Speaking(), tokenizer, settings(max_model_len=4096))
    answer = post(app, CHAT, {**ASK, "stream": streams})
    chunks = [json.loads(event)["choices"][0] for event in events(answer.text)[:-1]] if streams else []
    if streams:
        called = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
        content, reasoning = (
            "".join(chunk["delta"].get(name) or "" for chunk in chunks)
            for name in ("content", "reasoning_content")
        )
    else:
        message = answer.json()["choices"][0]["message"]
        called, content, reasoning = message["tool_calls"], message["content"], message["reasoning_content"]
    assert (content, reasoning) == ("I look.", "Hm.")
    assert json.loads("".join(call["function"]["arguments"] for call in called)) == {"city": "Oslo"}
    plain = post(app, CHAT, {**ASK, "tools": None}).json()["choices"][0]["message"]["content"]
    assert "tool_call" not in plain and plain.startswith("I look.")
