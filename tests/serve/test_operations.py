"""Keys and tenants, deadlines, log lines, the OpenAPI document."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import jsonschema
import pytest

from optkit.machine.logs import JsonFormatter, TextFormatter
from optkit.serve.openai.unsupported import INERT
from optkit.serve.openapi import document
from tests.support.serve_fakes import FakeEngine, SteppedEngine, call, client, events, post, tiny_app

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "the secret prompt"}]}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def ask_as(app: Any, key: str, **fields: Any) -> None:
    headers = {"authorization": f"Bearer {key}"}
    assert call(app, "POST", CHAT, json=HELLO | fields, headers=headers).status_code == 200


def test_each_key_has_a_cache_of_its_own_and_salts_divide_it_further() -> None:
    engine = FakeEngine()
    app = tiny_app(engine, api_keys=("one", "two"))
    for key, fields in (("one", {}), ("one", {}), ("two", {}), ("one", {"cache_salt": "x"})):
        ask_as(app, key, **fields)
    first, again, other, salted = (request.cache_salt for request in engine.requests)
    assert first == again
    assert len({first, other, salted}) == 3
    assert not any("one" in salt or "two" in salt for salt in (first, other, salted))


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends_with_an_error(stream: bool) -> None:
    engine = FakeEngine()
    engine.delay = 0.05
    app = tiny_app(engine, request_timeout=0.2)
    answer = post(app, CHAT, HELLO | {"stream": stream})
    if stream:
        *_, error, done = events(answer.text)
        assert (answer.status_code, done) == (200, "[DONE]")
    else:
        error = answer.text
        assert answer.status_code == 504
    assert json.loads(error)["error"]["code"] == "request_timeout"
    assert engine.aborted and app.state.parts.admission.used == 0


def test_a_request_that_waits_too_long_is_504_before_its_first_token() -> None:
    engine = FakeEngine()

    async def go() -> int:
        engine.gate = asyncio.Event()
        async with client(tiny_app(engine, request_timeout=0.1)) as http:
            return (await http.post(CHAT, json=HELLO | {"stream": True})).status_code

    assert asyncio.run(go()) == 504


def test_log_lines_tell_what_happened_and_nothing_of_what_was_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    post(tiny_app(FakeEngine("the secret answer")), CHAT, HELLO)
    post(tiny_app(), CHAT, HELLO | {"max_tokens": 10_000})
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    requests = [line for line in lines if line["message"] == "request"]
    assert [line["outcome"] for line in requests] == ["ok", "context_length_exceeded"]
    assert requests[0]["prompt_tokens"] > 0 and requests[0]["seconds"] >= 0
    assert "secret" not in json.dumps(lines)
    assert " outcome=ok " in TextFormatter().format(caplog.records[0])


def test_json_lines_hold_traces_and_stay_one_line() -> None:
    try:
        raise ValueError("line one\nline two")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "it broke", None, (type(error), error, None))
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert "line one" in json.loads(line)["trace"]


# -- OpenAPI ------------------------------------------------------------------------------------------


def test_the_document_lists_every_route() -> None:
    app = tiny_app()
    routes = {route.path.replace(":path", ""): route.methods - {"HEAD"} for route in app.routes}
    paths = {path: {method.upper() for method in methods} for path, methods in document()["paths"].items()}
    assert routes == paths
    assert call(app, "GET", "/openapi.json").json() == json.loads(json.dumps(document()))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO | {"logprobs": True, "top_logprobs": 2, "n": 2, "logit_bias": {"5": 1}, "stop": "x"}),
        (COMPLETIONS, {"prompt": ["a", "b"], "logprobs": 2, "echo": True, "max_tokens": 0}),
        (CHAT, HELLO | {"max_tokens": 100_000}),
        (CHAT, HELLO | {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (
            "/v1/responses",
            {"input": "Hello", "tools": [{"type": "function", "name": "f"}], "max_output_tokens": 5},
        ),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 100_000}),
        (
            "/v1/messages",
            HELLO | {"max_tokens": 5, "system": "x", "tools": [{"name": "f", "input_schema": {}}]},
        ),
        ("/v1/messages", HELLO | {"max_tokens": 100_000}),
        ("/v1/messages", HELLO | {"max_tokens": 5, "model": "other"}),
        ("/v1/messages/count_tokens", HELLO),
        ("/tokenize", HELLO),
        ("/tokenize", {"prompt": "Hello"}),
        ("/detokenize", {"tokens": [1, 2]}),
    ],
)
def test_requests_and_answers_are_as_documented(path: str, body: dict[str, Any]) -> None:
    api = json.loads(json.dumps(document()))
    operation = api["paths"][path]["post"]
    check(api, operation["requestBody"]["content"]["application/json"]["schema"], body)
    answer = post(tiny_app(SteppedEngine()), path, body)
    described = operation["responses"][str(answer.status_code)]["content"]["application/json"]["schema"]
    check(api, described, answer.json())


def test_the_request_schema_refuses_what_the_server_refuses() -> None:
    api = json.loads(json.dumps(document()))
    schema = api["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for bad in ({"n": 0}, {"logit_bias": {"a": 1}}, {"stop": [""]}, {"messages": []}, {"temperature": 3}):
        with pytest.raises(jsonschema.ValidationError):
            check(api, schema, HELLO | bad)
    chat_only = {"top_logprobs", "add_generation_prompt", "continue_final_message"}
    chat_only |= {"chat_template_kwargs", "reasoning_effort", "include_reasoning"}
    chat_only |= {"tools", "tool_choice", "parallel_tool_calls"}
    described = api["components"]["schemas"]
    assert set(described["ChatRequest"]["properties"]) & set(INERT) == chat_only
    assert set(described["CompletionRequest"]["properties"]) & set(INERT) == {"echo", "suffix"}


def check(api: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    jsonschema.Draft202012Validator({**schema, "components": api["components"]}).validate(value)
