"""OpenAI's rules of strict schemas."""

from __future__ import annotations

import copy
from typing import Any

import pydantic
import pytest
from openai.lib._pydantic import to_strict_json_schema

from optkit.serve.openai.strict_schema import strict_violation

GOOD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}},
        "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["name", "parts", "size"],
    "additionalProperties": False,
    "$defs": {
        "part": {
            "type": "object",
            "properties": {"id": {"type": "integer"}},
            "required": ["id"],
            "additionalProperties": False,
        }
    },
}


def changed(*path: str, value: Any = None) -> dict[str, Any]:
    """``GOOD`` with another value at ``path``, or without the key."""
    schema = copy.deepcopy(GOOD)
    inside = schema
    for key in path[:-1]:
        inside = inside[key]
    if value is None:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return schema


def test_a_good_schema_and_those_of_the_openai_package_pass() -> None:
    class Step(pydantic.BaseModel):
        text: str
        more: list[Step] | None

    class Answer(pydantic.BaseModel):
        steps: list[Step]
        kind: str | int

    assert strict_violation(GOOD) is None
    assert strict_violation(to_strict_json_schema(Answer)) is None


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (changed("type", value="array"), "type: 'array'"),
        (changed("type"), "type: None"),
        ({"anyOf": [GOOD]}, "type: None"),
        (changed("additionalProperties"), "context=(), 'additionalProperties'"),
        (changed("additionalProperties", value=True), "to be false"),
        (changed("required"), "Missing 'name'"),
        (changed("required", value=["name", "size"]), "Missing 'parts'"),
        (changed("$defs", "part", "additionalProperties"), "('$defs', 'part')"),
        (changed("$defs", "part", "required", value="id"), "Missing 'id'"),
    ],
)
def test_the_first_broken_rule_is_named(schema: dict[str, Any], words: str) -> None:
    assert words in str(strict_violation(schema))
