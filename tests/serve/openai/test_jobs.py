"""Requests become jobs with the prompt and the parameters that the engine gets."""

from __future__ import annotations

from typing import Any

import pytest

from optkit.runtime.specprefill.settings import SpecPrefill
from tests.support.http_calls import CHAT, COMPLETIONS, HELLO
from tests.support.serve_fakes import FakeEngine, post, tiny_app
from tests.support.tiny_tokenizer import fast_tokenizer, tiny_tokenizer


def test_chat_prompt_is_the_rendered_template() -> None:
    engine = FakeEngine()
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    post(tiny_app(engine), CHAT, {"messages": [{"role": "user", "content": parts}]})
    text = fast_tokenizer().decode(engine.requests[0].prompt_ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nHel\nlo<|im_end|>\n<|im_start|>assistant\n"
    assert engine.requests[0].sampling.max_tokens == 512 - len(engine.requests[0].prompt_ids)


def test_completion_defaults_and_length() -> None:
    engine = FakeEngine()
    body = post(tiny_app(engine), COMPLETIONS, {"prompt": "Hello"}).json()
    assert body["id"].startswith("cmpl-")
    assert engine.requests[0].sampling.max_tokens == 16
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 16


def test_token_id_prompt_is_passed_through() -> None:
    engine = FakeEngine()
    post(tiny_app(engine), COMPLETIONS, {"prompt": [5, 6, 7]})
    assert engine.requests[0].prompt_ids == (5, 6, 7)


def test_end_of_sequence_is_a_stop_id_unless_ignored() -> None:
    eos = tiny_tokenizer().eos_ids
    for ignore, want in ((False, (7, *eos)), (True, (7,))):
        engine = FakeEngine()
        post(tiny_app(engine), CHAT, {**HELLO, "ignore_eos": ignore, "stop_token_ids": [7]})
        assert engine.requests[0].sampling.stop_token_ids == want


def test_bad_words_are_spelled_at_the_beginning_and_after_a_space() -> None:
    engine = FakeEngine()
    post(tiny_app(engine), CHAT, {**HELLO, "bad_words": ["cat", "7"]})
    spelled = [tuple(tiny_tokenizer().encode(text)) for text in ("cat", " cat", "7", " 7")]
    assert engine.requests[0].sampling.bad_words == tuple(spelled)
    assert {token for ids in spelled for token in ids} <= set(engine.requests[0].sampling.named_tokens)


def test_sampling_fields_reach_the_engine() -> None:
    engine = FakeEngine()
    fields = {"temperature": 0, "top_p": 0.5, "top_k": 9, "min_p": 0.1, "seed": -3, "min_tokens": 2}
    fields |= {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5}
    answer = post(tiny_app(engine), CHAT, {**HELLO, **fields, "max_completion_tokens": 5, "max_tokens": 9})
    assert answer.status_code == 200
    sampling = engine.requests[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling.max_tokens == 5


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"specprefill": True}, SpecPrefill(enabled=True)),
        ({"specprefill": False}, SpecPrefill(enabled=False)),
        ({"specprefill_keep_pct": 0.2}, SpecPrefill(keep_pct=0.2)),
        ({"specprefill": True, "specprefill_keep_pct": 1}, SpecPrefill(enabled=True, keep_pct=1.0)),
    ],
)
def test_the_choice_on_specprefill_reaches_the_engine(
    fields: dict[str, Any], wanted: SpecPrefill | None
) -> None:
    engine = FakeEngine()
    post(tiny_app(engine), CHAT, {**HELLO, **fields})
    post(tiny_app(engine), COMPLETIONS, {"prompt": "Hello", **fields})
    assert [request.specprefill for request in engine.requests] == [wanted, wanted]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("specprefill", "yes"),
        ("specprefill_keep_pct", 0),
        ("specprefill_keep_pct", 25),
        ("specprefill_keep_pct", "a"),
    ],
)
def test_wrong_choices_on_specprefill_are_named(name: str, value: object) -> None:
    answer = post(tiny_app(FakeEngine()), CHAT, {**HELLO, name: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name
