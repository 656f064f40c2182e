"""OpenAI's rules on the schema of a ``strict`` response format or tool.

The rules make an answer of the schema unambiguous: the root is an object, every object has
``additionalProperties: false`` and lists all properties as required. An optional property is a union with null.
OpenAI's quotas (5,000 properties, ten levels) are not checked: grammars have bounds of their own.
"""

from __future__ import annotations

from typing import Any

from optkit.runtime.structured.schemas import subschemas


def strict_violation(schema: dict[str, Any]) -> str | None:
    """The first rule that ``schema`` breaks, in OpenAI's words; None for a good schema."""
    if schema.get("type") != "object":
        return f"schema must be a JSON Schema of 'type: \"object\"', got 'type: {schema.get('type')!r}'."
    for path, part in subschemas(schema):
        if not _is_object(part):
            continue
        context = f"In context={path}, "
        if part.get("additionalProperties") is not False:
            return f"{context}'additionalProperties' is required to be supplied and to be false."
        required, names = part.get("required"), part.get("properties", {})
        missing = [name for name in names if not isinstance(required, list) or name not in required]
        if missing:
            return (
                f"{context}'required' is required to be supplied and to be an array including every key in "
                f"properties. Missing '{missing[0]}'."
            )
    return None


def _is_object(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    return kind == "object" or (isinstance(kind, list) and "object" in kind) or "properties" in part
