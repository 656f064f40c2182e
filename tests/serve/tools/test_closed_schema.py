"""Closed schemas, judged by jsonschema: no further properties, and nothing that the schema refuses."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from optkit.serve.tools.closed_schema import closed

TEXT = {"type": "string"}
CITY = {"type": "object", "properties": {"name": TEXT, "size": {"type": "integer"}}, "required": ["name"]}


def accepts(schema: Any, value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize(
    ("schema", "good", "wider"),
    [
        (CITY, {"name": "Oslo"}, {"name": "Oslo", "type": "string"}),
        ({"properties": {"at": CITY}}, {"at": {"name": "a", "size": 1}}, {"at": {"name": "a", "x": 1}}),
        (
            {"type": "object", "properties": {"all": {"type": "array", "items": CITY}}},
            {"all": [{"name": "a"}, {"name": "b"}]},
            {"all": [{"name": "a"}, {"name": "b", "x": 1}]},
        ),
        (
            {"properties": {"at": {"$ref": "#/$defs/City"}}, "$defs": {"City": CITY}},
            {"at": {"name": "a"}},
            {"at": {"name": "a", "x": 1}},
        ),
        (
            {"properties": {"at": {"anyOf": [CITY, {"type": "null"}]}}},
            {"at": None},
            {"at": {"name": "a", "x": 1}},
        ),
        (
            {"properties": {"anyOf": TEXT, "items": TEXT}},
            {"anyOf": "a", "items": "b"},
            {"anyOf": "a", "x": 1},
        ),
    ],
)
def test_further_properties_are_refused_and_named_ones_stay(schema: Any, good: Any, wider: Any) -> None:
    assert accepts(schema, good) and accepts(schema, wider)
    assert accepts(closed(schema), good) and not accepts(closed(schema), wider)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"properties": {"a": TEXT}, "additionalProperties": True},
        {"properties": {"a": TEXT}, "additionalProperties": TEXT},
        {"properties": {"a": TEXT}, "patternProperties": {"^x": TEXT}},
        {"allOf": [{"properties": {"a": TEXT}}, {"properties": {"b": TEXT}}]},
        {"properties": {"a": TEXT}, "anyOf": [{"properties": {"b": TEXT}}, {"properties": {"c": TEXT}}]},
        {"properties": {"a": TEXT}, "$ref": "#/$defs/B", "$defs": {"B": {"properties": {"b": TEXT}}}},
        {"properties": {"at": {"oneOf": [CITY, {"properties": {"name": TEXT, "x": TEXT}}]}}},
        {"properties": {"a": {"enum": [{"properties": {"b": 1}}]}}, "additionalProperties": True},
        {"properties": True},
    ],
)
def test_schemas_that_leave_room_on_purpose_or_in_parts_stay(schema: Any) -> None:
    assert closed(schema) == schema
