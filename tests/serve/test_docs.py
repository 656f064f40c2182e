"""docs/http-api.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from optkit.serve.openai.protocol import ChatRequest, CompletionRequest
from optkit.serve.openai.unsupported import HARMLESS, INERT
from optkit.serve.openapi import document
from tests.support.serve_fakes import post, tiny_app

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "http-api.md").read_text()
FIELDS = dict(re.findall(r"^\| `(\w+)` \| (yes|no|chat|completions|harmless) \|", PAGE, re.MULTILINE))
ENDPOINTS = re.findall(r"^\| `(GET|POST|DELETE) (\S+)` \|", PAGE, re.MULTILINE)
MODELS = {"chat": ChatRequest, "completions": CompletionRequest}


def test_every_field_is_in_the_table_and_no_other() -> None:
    supported = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    assert set(FIELDS) == supported | set(INERT) | HARMLESS
    assert {name for name, where in FIELDS.items() if where == "harmless"} == HARMLESS


@pytest.mark.parametrize(("name", "where"), FIELDS.items())
def test_a_field_is_supported_where_the_table_says(name: str, where: str) -> None:
    found = {endpoint for endpoint, model in MODELS.items() if name in model.model_fields}
    assert found == {"yes": {"chat", "completions"}, "no": set(), "harmless": set()}.get(where, {where})


@pytest.mark.parametrize("name", [name for name, where in FIELDS.items() if where == "no"])
def test_an_unsupported_field_is_refused_by_name(name: str) -> None:
    for path, body in (("chat/completions", {"messages": []}), ("completions", {"prompt": "x"})):
        answer = post(tiny_app(), f"/v1/{path}", {**body, name: "something"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_every_endpoint_is_listed() -> None:
    wanted = {(method.upper(), path) for path, methods in document()["paths"].items() for method in methods}
    assert set(ENDPOINTS) == wanted
