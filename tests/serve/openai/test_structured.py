"""Every spelling of a constraint over HTTP, with the real engine on a fake model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import httpx
import openai
import pydantic
import pytest

from optkit.runtime.structured import grammar
from optkit.runtime.types import Constraint
from optkit.serve.http.errors import ApiError
from optkit.serve.openai.parsing import parse_request
from optkit.serve.openai.protocol import ChatRequest, CompletionRequest
from tests.support.live import PATIENCE, LiveServer
from tests.support.serve_fakes import SteppedEngine, client, events, tiny_app

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 50}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def response_format(schema: object = SCHEMA, **fields: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}


def parsed(kind: type = ChatRequest, **fields: object) -> ChatRequest | CompletionRequest:
    given = {"prompt": "x"} if kind is CompletionRequest else {"messages": [{"role": "user", "content": "x"}]}
    return parse_request(kind, json.dumps(given | fields).encode())


def constraint(**fields: object) -> Constraint | None:
    found = parsed(**fields).constraint
    return found.constraint if found else None


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_spellings_of_the_same_constraint_are_the_same(kind: type) -> None:
    text = json.dumps(SCHEMA, ensure_ascii=False)

    def found(**fields: object) -> Constraint | None:
        named = parsed(kind, **fields).constraint
        return named.constraint if named else None

    wanted = Constraint("json_schema", text)
    assert found(response_format=response_format()) == wanted
    assert found(response_format=response_format(strict=True)) == wanted
    assert found(structured_outputs={"json": SCHEMA}) == found(guided_json=SCHEMA) == wanted
    assert found(structured_outputs={"json": text}) == found(guided_json=text) == wanted
    assert found(structured_outputs={"regex": "a+"}) == found(guided_regex="a+") == Constraint("regex", "a+")
    choice = Constraint("choice", '["a", "b"]')
    assert found(structured_outputs={"choice": ["a", "b"]}) == found(guided_choice=["a", "b"]) == choice
    grammar_ = Constraint("grammar", "start: A")
    assert found(structured_outputs={"grammar": "start: A"}) == found(guided_grammar="start: A") == grammar_
    assert found(response_format={"type": "json_object"}) == Constraint("json_object")
    assert found(structured_outputs={"json_object": True}) == Constraint("json_object")
    loose = {"json": SCHEMA, "whitespace_pattern": " ?"}
    assert found(structured_outputs=loose) == Constraint("json_schema", text, whitespace=" ?")
    assert found(guided_json=SCHEMA, guided_whitespace_pattern=" ?") == Constraint(
        "json_schema", text, whitespace=" ?"
    )
    for nothing in (
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"guided_json": None},
    ):
        assert found(**nothing) is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format", "type"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format",
            "name",
        ),
        ({"response_format": response_format(name="a b")}, "response_format", "name"),
        ({"response_format": response_format(name="a" * 65)}, "response_format", "name"),
        ({"response_format": response_format([1])}, "response_format", "schema"),
        (
            {"response_format": response_format({"type": "object"}, strict=True)},
            "response_format",
            "additionalProp",
        ),
        ({"response_format": response_format({"type": "array"}, strict=True)}, "response_format", "object"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        (
            {"structured_outputs": {"disable_additional_properties": True, "regex": "a"}},
            "structured_outputs",
            "disable",
        ),
        ({"structured_outputs": {"choices": ["a"]}}, "structured_outputs", "choices"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_regex": ""}, "guided_regex", "at least 1"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_json": "[1]"}, "guided_json", "object"),
        ({"guided_json": "[" * 100_000}, "guided_json", "JSON"),
        ({"guided_json": '{"enum": ["\\ud800"]}'}, "guided_json", "surrogate"),
        ({"guided_json": '{"enum": [NaN]}'}, "guided_json", "NaN"),
        ({"guided_json": '{"type": "string", "type": "null"}'}, "guided_json", "duplicate"),
        ({"guided_json": '{"items":' * 100 + "{}" + "}" * 100}, "guided_json", "deeper than 64"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "exclude"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "exclude"),
        ({"guided_regex": "a", "allowed_token_ids": [1]}, "allowed_token_ids", "exclude"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
def test_a_wrong_field_is_400_and_named(fields: dict[str, object], param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        constraint(**fields)
    assert (caught.value.status, caught.value.param) == (400, param) and words in caught.value.message


def ask(*requests: tuple[str, dict[str, Any]]) -> list[httpx.Response]:
    """The answers to ``requests``, on one event loop."""

    async def go() -> list[httpx.Response]:
        app = tiny_app(SteppedEngine())
        try:
            async with client(app) as http:
                return [await http.post(path, json=body) for path, body in requests]
        finally:
            await app.state.parts.constraints.close()

    return asyncio.run(go())


def chat(**fields: object) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 80, "seed": 3, **fields}


def test_answers_follow_the_constraint() -> None:
    object_, pattern, choice, stream, stopped, several, cut, logprobs, completion = ask(
        chat(response_format=response_format(strict=True)),
        chat(structured_outputs={"regex": "[0-9]{3}-[a-c]+"}),
        chat(guided_choice=["one", "two"]),
        chat(response_format=response_format(), stream=True, stream_options={"include_usage": True}),
        chat(response_format=response_format(), stop=["b"]),
        chat(guided_regex="[a-f]{2,9}", n=4),
        chat(response_format=response_format(), max_tokens=4),
        chat(response_format=response_format(), logprobs=True, top_logprobs=2),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 40, "seed": 1, "guided_grammar": 'root ::= [0-9]+ "x"'}),
    )
    answer = object_.json()["choices"][0]
    data = json.loads(answer["message"]["content"])
    assert set(data) == {"a", "b"} and 0 <= data["a"] <= 50 and answer["finish_reason"] == "stop"
    assert pattern.json()["choices"][0]["message"]["content"][3] == "-"
    assert choice.json()["choices"][0]["message"]["content"] in ("one", "two")
    chunks = [json.loads(event) for event in events(stream.text)[:-1]]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text == answer["message"]["content"]
    assert chunks[-1]["usage"]["completion_tokens"] == object_.json()["usage"]["completion_tokens"]
    (found,) = stopped.json()["choices"]
    assert found["finish_reason"] == "stop" and found["message"]["content"].endswith(', "')
    texts = [found["message"]["content"] for found in several.json()["choices"]]
    assert all(2 <= len(t) <= 9 and set(t) <= set("abcdef") for t in texts) and len(set(texts)) > 1
    assert cut.json()["choices"][0]["finish_reason"] == "length"
    entries = logprobs.json()["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == answer["message"]["content"]
    assert completion.json()["choices"][0]["text"].endswith("x")


def test_a_constraint_that_can_not_be_compiled_is_400_before_the_engine() -> None:
    unsupported, slow, good = ask(
        chat(response_format=response_format({"type": "object", "propertyNames": {"maxLength": 2}})),
        chat(response_format=response_format({"type": "integer", "multipleOf": 1000003})),
        chat(guided_regex="a{3}"),
    )
    error = unsupported.json()["error"]
    assert (unsupported.status_code, error["param"]) == (400, "response_format") and "propertyNames" in error[
        "message"
    ]
    assert slow.status_code == 400 and "50 ms" in slow.json()["error"]["message"]
    assert good.json()["choices"][0]["message"]["content"] == "aaa"


def test_the_wrong_schema_beside_others_is_named() -> None:
    """Of many tools one is wrong; or the format of the content beside tools."""
    good = {"type": "object", "properties": {"a": {"type": "integer"}}}
    ahead = {"type": "object", "properties": {"b": {"type": "string", "pattern": "^(?!x)"}}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in (("fine", good), ("wrong", ahead), ("late", good))
    ]
    least = {"type": "object", "minProperties": 3, "additionalProperties": {"type": "integer"}}
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    for fields, param, code, words in (
        (
            {"tools": tools, "tool_choice": "required"},
            "tools",
            "invalid_function_parameters",
            "'wrong': regex",
        ),
        (
            {"tools": tools[:1], "response_format": response_format({"not": {}})},
            "response_format",
            "invalid_json_schema",
            "not supported: not",
        ),
        (
            {"tools": tools[:1], "response_format": response_format(least)},
            "response_format",
            "invalid_json_schema",
            "minProperties",
        ),
        (
            {"response_format": response_format(loop)},
            "response_format",
            "invalid_json_schema",
            "no finite text",
        ),
    ):
        (answer,) = ask(chat(**fields))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
        assert words in error["message"] and " at " not in error["message"].partition("(")[0]


def test_a_constraint_that_becomes_too_complex_is_an_error_of_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar, "STEP_LEXER_FUEL", 50)  # of the engine; the process that checks has its own
    (answer,) = ask(chat(guided_regex="(.*[a-f].{50}){9}"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "constraint_failed")


def test_words_that_a_constraint_needs_and_the_request_forbids_are_its_own_error() -> None:
    needed, other = ask(
        chat(guided_choice=["yes"], bad_words=["y"]), chat(guided_choice=["yes"], bad_words=["no"])
    )
    assert (needed.status_code, needed.json()["error"]["code"]) == (400, "no_token_left")
    assert other.json()["choices"][0]["message"]["content"] == "yes"


class Answer(pydantic.BaseModel):
    """As a client of OpenAI writes it."""

    kind: Literal["cat", "dog"]
    sizes: list[bool]
    code: Annotated[str, pydantic.Field(pattern="^[a-c]{2}$")] | None


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(script=None, step_delay=0.002) as live:
        yield live


@pytest.fixture
def api(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


HELLO: Any = [{"role": "user", "content": "Hello"}]


def test_the_openai_client_parses_answers_into_classes(api: openai.OpenAI) -> None:
    answer = api.chat.completions.parse(model="tiny", messages=HELLO, response_format=Answer, seed=1)
    assert isinstance(answer.choices[0].message.parsed, Answer)
    with api.chat.completions.stream(model="tiny", messages=HELLO, response_format=Answer, seed=1) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed
    assert "content.delta" in kinds and kinds[-1] in ("content.done", "chunk")


def test_an_unsupported_schema_is_an_error_of_the_client(api: openai.OpenAI) -> None:
    class Odd(pydantic.BaseModel):
        names: set[str]  # uniqueItems

    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        api.chat.completions.parse(model="tiny", messages=HELLO, response_format=Odd)
    assert caught.value.param == "response_format"


def test_constrained_answers_go_on_after_the_engine_died(api: openai.OpenAI, server: LiveServer) -> None:
    """The stream ends with an error; the new engine compiles the grammar again and gives the same answer."""

    def ask_for(pattern: str, **fields: Any) -> Any:
        extra = {"guided_regex": pattern}
        return api.chat.completions.create(model="tiny", messages=HELLO, extra_body=extra, seed=5, **fields)

    before = ask_for("[a-f]{30}").choices[0].message.content
    stream = ask_for("[a-f]{400}", stream=True)
    next(iter(stream))
    (engine,) = [child for child in server.children() if "worker" in " ".join(child.cmdline())]
    engine.kill()
    with pytest.raises(openai.APIError, match="engine"):
        list(stream)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            after = ask_for("[a-f]{30}").choices[0].message.content
            break
        except openai.APIStatusError as error:
            assert error.status_code == 503 and time.monotonic() < deadline
            time.sleep(0.1)
    assert after == before and len(after) == 30
