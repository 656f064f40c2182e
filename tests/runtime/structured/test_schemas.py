"""Schemas inside schemas, and rules that an answer could break."""

from __future__ import annotations

import pytest

from optkit.runtime.structured.schemas import subschemas, unenforceable


def test_subschemas_are_those_where_json_schema_has_them() -> None:
    leaf = {"type": "string"}
    schema = {
        "properties": {"a": leaf, "minProperties": leaf},
        "items": {"anyOf": [leaf, True]},
        "additionalProperties": leaf,
        "enum": [{"minProperties": 9}],
        "default": {"type": "x"},
        "$defs": {"d": {"prefixItems": [leaf]}},
    }
    assert [path for path, _ in subschemas(schema)] == [
        (),
        ("properties", "a"),
        ("properties", "minProperties"),
        ("$defs", "d"),
        ("$defs", "d", "prefixItems", "0"),
        ("items",),
        ("items", "anyOf", "0"),
        ("additionalProperties",),
    ]


@pytest.mark.parametrize(
    ("least", "required", "refused"),
    [(1, [], False), (2, [], True), (2, ["a", "b"], False), (3, ["a", "b"], True)],
)
def test_keys_that_may_come_twice_do_not_count(least: int, required: list[str], refused: bool) -> None:
    schema = {"type": "array", "items": {"type": "object", "minProperties": least, "required": required}}
    reason = unenforceable(schema)
    assert bool(reason) == refused and (
        not refused or ("minProperties" in str(reason) and "items" in str(reason))
    )


def test_names_of_properties_are_no_keywords() -> None:
    assert (
        unenforceable({"properties": {"minProperties": {"type": "integer"}}, "enum": [{"minProperties": 5}]})
        is None
    )
