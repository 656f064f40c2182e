"""``suffix`` for models with tokens for it, and a clear refusal for the rest."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from optkit.serve.app import create_app
from optkit.serve.openai.fill_in import NAMES
from optkit.text.tokenizer import Tokenizer
from tests.support.http_calls import CHAT, COMPLETIONS, HELLO
from tests.support.serve_fakes import FakeEngine, post, settings, tiny_app
from tests.support.tiny_tokenizer import fast_tokenizer


def tokenizer(names: tuple[str, ...]) -> Tokenizer:
    fast = FastTokenizer.from_str(fast_tokenizer().to_str())
    fast.add_special_tokens([AddedToken(name, special=True) for name in names])
    return Tokenizer(fast, None, [1])


@pytest.mark.parametrize("names", NAMES)
def test_prompt_is_prefix_suffix_middle_in_the_model_s_own_tokens(names: tuple[str, ...]) -> None:
    engine, model = FakeEngine(), tokenizer(names)
    body: dict[str, Any] = {"prompt": "def f(", "suffix": "return x", "echo": True}
    answer = post(create_app(engine, model, settings()), COMPLETIONS, body)
    prefix, suffix, middle = (model.token_id(name) for name in names)
    before, after = model.encode("def f("), model.encode("return x")
    assert list(engine.requests[0].prompt_ids) == [prefix, *before, suffix, *after, middle]
    assert answer.json()["choices"][0]["text"].startswith("def f(")


def test_model_without_the_tokens_refuses() -> None:
    answer = post(tiny_app(), COMPLETIONS, {"prompt": "a", "suffix": "b"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")
    assert "vocabulary" in answer.json()["error"]["message"]


def test_suffix_needs_text_and_no_chat() -> None:
    app = create_app(FakeEngine(), tokenizer(NAMES[0]), settings())
    for path, body in ((COMPLETIONS, {"prompt": [1], "suffix": "b"}), (CHAT, {**HELLO, "suffix": "b"})):
        answer = post(app, path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")


def test_empty_suffix_asks_for_nothing() -> None:
    assert post(tiny_app(), COMPLETIONS, {"prompt": "a", "suffix": ""}).status_code == 200
