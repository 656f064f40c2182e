"""JSON Schemas whose objects have the named properties alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keywords with schemas for a part of an object's properties: the rest are named elsewhere.
PARTIAL = frozenset(["allOf", "oneOf", "not", "if", "dependentSchemas", "$dynamicRef", "$recursiveRef"])
BESIDE = frozenset(["anyOf", "$ref"])  # the same, next to ``properties``
OPENING = frozenset(["additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"])
MAPPINGS = frozenset(["properties", "$defs", "definitions"])
LISTS = frozenset(["anyOf", "prefixItems"])


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """``schema`` with ``additionalProperties: false`` wherever properties are named and others not mentioned.

    A schema that describes an object in several parts (``allOf`` and the like, anywhere) is returned unchanged.
    """
    return schema if _in_parts(schema) else _closed(schema)


def _in_parts(value: Any) -> bool:
    if isinstance(value, Mapping):
        beside = "properties" in value and not BESIDE.isdisjoint(value)
        return beside or not PARTIAL.isdisjoint(value) or any(map(_in_parts, value.values()))
    return isinstance(value, list) and any(map(_in_parts, value))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema  # true, false, or nonsense for others to refuse
    found = {name: _keyword(name, value) for name, value in schema.items()}
    if isinstance(found.get("properties"), dict) and found["properties"] and OPENING.isdisjoint(found):
        found["additionalProperties"] = False
    return found


def _keyword(name: str, value: Any) -> Any:
    if name in MAPPINGS and isinstance(value, Mapping):
        return {key: _closed(part) for key, part in value.items()}
    if name in LISTS and isinstance(value, list):
        return [_closed(part) for part in value]
    return _closed(value) if name == "items" else value
