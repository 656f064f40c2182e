"""Wrong types and bad keys are 400 with the name of what is wrong; the other side is each field's JSON schema."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from optkit.serve.openapi import document
from tests.support.serve_fakes import FakeEngine, post, tiny_app

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GOOD = {CHAT: {"messages": [{"role": "user", "content": "Hello"}]}, COMPLETIONS: {"prompt": "Hello"}}
KINDS = {CHAT: "ChatRequest", COMPLETIONS: "CompletionRequest"}
EMPTY_VALUES: list[Any] = [{}, [], False, 0, 0.0, ""]
SCHEMAS = document()["components"]["schemas"]


def allows(path: str, field: str, value: Any) -> bool:
    """True when the published schema of ``field`` allows ``value``."""
    schema = {**SCHEMAS[KINDS[path]]["properties"][field], "components": {"schemas": SCHEMAS}}
    if isinstance(value, float) and _only_integers(schema):
        return False  # to JSON Schema 0.0 is an integer, to this server it is not
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def _only_integers(schema: dict[str, Any]) -> bool:
    kinds = {branch.get("type") for branch in schema.get("anyOf", [schema])}
    return kinds <= {"integer", "null"}


CASES = [
    (path, field, value)
    for path, kind in KINDS.items()
    for field in SCHEMAS[kind]["properties"]
    for value in EMPTY_VALUES
    if not allows(path, field, value)
]


@pytest.mark.parametrize(("path", "field", "value"), CASES, ids=[f"{f}={v!r}" for _, f, v in CASES])
def test_empty_value_of_a_wrong_type_is_400_and_names_the_field(path: str, field: str, value: Any) -> None:
    engine = FakeEngine()
    answer = post(tiny_app(engine), path, {**GOOD[path], field: value})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert not engine.requests


@pytest.mark.parametrize("field", ["tool_calls", "function_call"])
@pytest.mark.parametrize("value", [{}, False, 0, ""])
def test_empty_value_in_a_message_is_400_and_names_the_messages(field: str, value: Any) -> None:
    body = {"messages": [{"role": "assistant", "content": "a", field: value}]}
    answer = post(tiny_app(), CHAT, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_empty_lists_and_null_of_a_message_ask_for_nothing() -> None:
    for extra in ({"tool_calls": []}, {"tool_calls": None, "function_call": None}):
        body = {"messages": [{"role": "assistant", "content": "a", **extra}]}
        assert post(tiny_app(), CHAT, body).status_code == 200


def test_empty_model_name_is_404() -> None:
    answer = post(tiny_app(), CHAT, {**GOOD[CHAT], "model": ""})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


@pytest.mark.parametrize(
    ("bias", "named"),
    [
        ({"5": 1, "abc": 1}, "'abc'"),
        ({"5": 1, "-1": 1}, "'-1'"),
        ({"5": 1, "": 1}, "''"),
        ({"5": 1, "5 5": 1}, "'5 5'"),
        ({"5": 1, "1" * 500: 1}, "'" + "1" * 20),
        ({"5": 1, "7": 101}, "'7'"),
        ({"5": 1, "7": True}, "'7'"),
        ({"5": 1, "7": "1"}, "'7'"),
        ({"5": 1, "400": 1}, "400"),
        ({"5": 1, "05": 2}, "'05'"),
    ],
)
def test_logit_bias_error_names_the_key(bias: dict[str, Any], named: str) -> None:
    error = post(tiny_app(), CHAT, {**GOOD[CHAT], "logit_bias": bias}).json()["error"]
    assert error["param"] == "logit_bias"
    assert named in error["message"]
    assert len(error["message"]) < 250
    assert "function-" not in error["message"] and "tuple" not in error["message"]


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_token_id_outside_the_vocabulary_is_named(field: str) -> None:
    error = post(tiny_app(), CHAT, {**GOOD[CHAT], field: [5, 302, 7]}).json()["error"]
    assert error["param"] == field
    assert "302" in error["message"] and "[0, 302)" in error["message"]
    error = post(tiny_app(), COMPLETIONS, {"prompt": [5, 400]}).json()["error"]
    assert "400" in error["message"]


def test_logit_bias_error_shows_no_control_characters() -> None:
    error = post(tiny_app(), CHAT, {**GOOD[CHAT], "logit_bias": {"a\n\u001bb": 1}}).json()["error"]
    assert "\n" not in error["message"] and "\u001b" not in error["message"]
