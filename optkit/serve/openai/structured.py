"""Structured output in requests: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and ``guided_*``.

Each spelling becomes a ``Constraint``; a request has one at most. Schemas are enforced with ``strict`` and without:
``strict`` adds OpenAI's rules on the schema itself.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from optkit.runtime.types import Constraint
from optkit.serve.constraints.checker import NamedConstraint
from optkit.serve.http.errors import ApiError, printable, unsupported
from optkit.serve.http.json_body import BadJson, object_in
from optkit.serve.openai.strict_schema import strict_violation

MAX_CHOICES = 4096

Pattern = Annotated[str, Field(min_length=1)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
Schema = dict[str, Any] | str


class JsonSchema(BaseModel):
    """The ``json_schema`` of a response format."""

    model_config = ConfigDict(strict=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's form: any text, any JSON object, or JSON of a schema."""

    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """vLLM's form: one of several kinds of constraints. ``disable_any_whitespace`` is what happens anyway."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None
    whitespace_pattern: Pattern | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None
    structural_tag: None = None


class Fields(Protocol):
    """The fields of a request that describe constraints."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: Schema | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    guided_whitespace_pattern: str | None
    allowed_token_ids: list[int] | None


def constraint_of(request: Fields) -> NamedConstraint | None:
    """The constraint in ``request``.

    Raises:
        ApiError: 400, several constraints, or one that breaks OpenAI's rules.
    """
    found = [*_response_format(request), *_structured_outputs(request), *_guided(request)]
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(f"'{named.param}'" for named in found[:2])
        raise ApiError(f"{names} exclude each other", param=found[1].param, code="invalid_value")
    if request.allowed_token_ids:
        message = f"'allowed_token_ids' and '{found[0].param}' exclude each other"
        raise ApiError(message, param="allowed_token_ids", code="invalid_value")
    return found[0]


def _response_format(request: Fields) -> list[NamedConstraint]:
    given, param = request.response_format, "response_format"
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [NamedConstraint(Constraint("json_object"), param)]
    if given.json_schema is None:
        raise ApiError(
            "'response_format.json_schema' is missing", param=param, code="missing_required_parameter"
        )
    schema, name = given.json_schema.schema_, given.json_schema.name
    if given.json_schema.strict and (violation := strict_violation(schema)):
        message = f"Invalid schema for response_format '{name}': {printable(violation)}"
        raise ApiError(message, param=param, code="invalid_json_schema")
    return [NamedConstraint(_schema(schema, param), param)]


def _structured_outputs(request: Fields) -> list[NamedConstraint]:
    given, param = request.structured_outputs, "structured_outputs"
    if given is None:
        return []
    found = _kinds(
        given.json_, given.regex, given.choice, given.grammar, given.whitespace_pattern, [param] * 4
    )
    if given.json_object:
        found.append(
            NamedConstraint(Constraint("json_object", whitespace=given.whitespace_pattern or ""), param)
        )
    if len(found) != 1:
        message = f"'{param}' needs exactly one of json, regex, choice, grammar and json_object"
        raise ApiError(message, param=param, code="invalid_value")
    return found


def _guided(request: Fields) -> list[NamedConstraint]:
    params = ["guided_json", "guided_regex", "guided_choice", "guided_grammar"]
    found = _kinds(
        request.guided_json,
        request.guided_regex,
        request.guided_choice,
        request.guided_grammar,
        request.guided_whitespace_pattern,
        params,
    )
    if request.guided_whitespace_pattern and request.guided_json is None:
        raise unsupported("guided_whitespace_pattern", "'guided_whitespace_pattern' needs 'guided_json'")
    return found


def _kinds(
    schema: Schema | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    whitespace: str | None,
    params: list[str],
) -> list[NamedConstraint]:
    """The constraints that are not None; ``params`` are the fields in the same order."""
    found = []
    if schema is not None:
        found.append(NamedConstraint(_schema(schema, params[0], whitespace or ""), params[0]))
    if regex is not None:
        found.append(NamedConstraint(Constraint("regex", regex), params[1]))
    if choice is not None:
        found.append(NamedConstraint(Constraint("choice", json.dumps(choice)), params[2]))
    if grammar is not None:
        found.append(NamedConstraint(Constraint("grammar", grammar), params[3]))
    return found


def _schema(schema: Schema, param: str, whitespace: str = "") -> Constraint:
    """The constraint of a schema, given as an object or as its JSON text."""
    if isinstance(schema, str):
        try:
            schema = object_in(schema)
        except BadJson as error:
            raise ApiError(f"'{param}' {error}", param=param, code="invalid_json_schema") from None
    return Constraint("json_schema", json.dumps(schema, ensure_ascii=False), whitespace=whitespace)
