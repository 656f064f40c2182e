"""JSON Schemas: the schemas inside a schema, and keywords beyond a grammar that llguidance accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NESTED = ("properties", "$defs", "definitions", "patternProperties")  # objects of schemas
LISTED = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
SINGLE = ("items", "additionalProperties", "additionalItems")

Path = tuple[str, ...]


def subschemas(schema: Any, path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """``schema`` and every schema inside, with the path. The parser of the JSON text bounds the depth."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for key in NESTED:
        inside = schema.get(key)
        if isinstance(inside, dict):
            for name, part in inside.items():
                yield from subschemas(part, (*path, key, name))
    for key in LISTED:
        inside = schema.get(key)
        if isinstance(inside, list):
            for index, part in enumerate(inside):
                yield from subschemas(part, (*path, key, str(index)))
    for key in SINGLE:
        yield from subschemas(schema.get(key), (*path, key))


def unenforceable(schema: Any) -> str | None:
    """The first rule of ``schema`` that an answer could break, in words; None for a good schema.

    A grammar has no memory for keys outside ``properties``, so a key may come twice. JSON keeps the last value, and
    the object has fewer properties than the grammar counted.
    """
    for path, part in subschemas(schema):
        least, required = part.get("minProperties"), part.get("required", [])
        named = len(required) if isinstance(required, list) else 0
        if isinstance(least, int) and least > max(named, 1):
            where = "/".join(path) or "the root"
            return f"minProperties of {least} with {named} required properties is not supported (at {where})"
    return None
