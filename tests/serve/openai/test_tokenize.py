"""``/tokenize`` says what a request would use, and ``/detokenize`` inverts it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chat_templates import QWEN
from tests.support.http_calls import CHAT, HELLO
from tests.support.serve_fakes import FakeEngine, post, tiny_app
from tests.support.tiny_tokenizer import tiny_tokenizer

TOOL = {"type": "function", "function": {"name": "f", "description": "A tool."}}
APP = tiny_app()


def test_text_gives_ids_count_and_names() -> None:
    body = post(APP, "/tokenize", {"prompt": "hello hello", "return_token_strs": True}).json()
    ids = tiny_tokenizer().encode("hello hello")
    names = [tiny_tokenizer().token(token) for token in ids]
    assert body == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": names}
    assert post(APP, "/tokenize", {"prompt": ""}).json()["tokens"] == []


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}, {"add_generation_prompt": False}])
def test_conversation_gives_the_ids_that_the_engine_gets(fields: dict[str, Any]) -> None:
    engine = FakeEngine()
    app = tiny_app(engine, QWEN, max_model_len=4096)
    post(app, CHAT, {**HELLO, **fields})
    assert post(app, "/tokenize", {**HELLO, **fields}).json()["tokens"] == list(engine.requests[0].prompt_ids)


@settings(max_examples=30)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=50))
def test_detokenize_inverts_tokenize(text: str) -> None:
    ids = post(APP, "/tokenize", {"prompt": text}).json()["tokens"]
    assert post(APP, "/detokenize", {"tokens": ids}).json() == {"prompt": text}


def test_special_tokens_are_text() -> None:
    ids = post(APP, "/tokenize", HELLO).json()["tokens"]
    assert post(APP, "/detokenize", {"tokens": ids}).json()["prompt"].startswith("<|im_start|>user\nHello")


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 7}, 400, "prompt"),
        ("/tokenize", {**HELLO, "prompt": "x"}, 400, "messages"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [999_999]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
def test_wrong_request_is_refused_by_name(path: str, body: dict[str, Any], status: int, param: str) -> None:
    answer = post(APP, path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
