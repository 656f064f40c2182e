"""Types of request fields with checks beyond JSON Schema and pydantic: checked, bounded, normalized.

Each type has a hand-written JSON schema beside its check, for the OpenAPI document; schema and check agree.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from optkit.serve.http.errors import printable

MAX_PROMPTS = 64
MAX_CHOICES = 128  # of one request: prompts times n
MAX_BEAMS = 32  # of one prompt: each token of a search asks for twice as many logprobs of every beam
MAX_MESSAGES = 2048
MAX_STOPS, MAX_STOP_CHARS = 64, 256
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 256, 256
MAX_SUFFIX_CHARS = 1 << 20
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_INT = 2**31 - 1

Count = Annotated[int, Field(ge=1, le=MAX_INT)]
Natural = Annotated[int, Field(ge=0, le=MAX_INT)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
Scalar = Annotated[str, Field(max_length=256)] | int | float | bool | None


def _stop_list(value: Any) -> Any:
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise ValueError(f"must be a string or a list of at most {MAX_STOPS} strings")
    if not all(isinstance(stop, str) and 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"each stop string has 1 to {MAX_STOP_CHARS} characters")
    return stops


def _bias_pairs(value: Any) -> Any:
    """``{"50256": -100}`` as pairs of int and float; JSON keys are strings."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise ValueError(f"must be an object of at most {MAX_BIASES} token ids")
    pairs: dict[int, float] = {}
    for token, bias in value.items():
        name = f"'{printable(token, 20)}'"
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise ValueError(f"the key {name} is not a token id in decimal digits")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {name} is not a number from -100 to 100")
        if int(token) in pairs:
            raise ValueError(f"the key {name} names a token for the second time")
        pairs[int(token)] = float(bias)
    return tuple(sorted(pairs.items()))


STOP_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "null"},
        {"type": "string", "maxLength": MAX_STOP_CHARS},
        {
            "type": "array",
            "maxItems": MAX_STOPS,
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
        },
    ]
}
BIAS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "maxProperties": MAX_BIASES,
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}


def _content(value: Any) -> Any:
    """Message content as a single string: text parts are joined by newlines, as vLLM does."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise ValueError("must be a string or a list of content parts")
    if any(part.get("type") != "text" for part in value):
        raise ValueError("only text content parts are supported")
    texts = [part.get("text") for part in value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a text part needs a 'text' string")
    return "\n".join(texts)


CONTENT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "null"},
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """The four shapes of ``prompt`` as a list of texts or a list of id lists."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, token ids or a list of token id lists")
    if set(map(type, value)) == {int}:
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts in one request")
    if set(map(type, value)) == {str}:
        return value
    if set(map(type, value)) == {list} and all(set(map(type, ids)) <= {int} for ids in value):
        return value
    raise ValueError("must be a string, a list of strings, token ids or a list of token id lists")


IDS_SCHEMA: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
            "items": {"type": "string", "minLength": 1},
        },
        IDS_SCHEMA,
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": IDS_SCHEMA},
    ]
}

Stops = Annotated[list[str], BeforeValidator(_stop_list), WithJsonSchema(STOP_SCHEMA)]
LogitBias = Annotated[
    tuple[tuple[int, float], ...], BeforeValidator(_bias_pairs), WithJsonSchema(BIAS_SCHEMA)
]
Content = Annotated[str, BeforeValidator(_content), WithJsonSchema(CONTENT_SCHEMA)]
Prompts = Annotated[list[Any], BeforeValidator(_prompts), WithJsonSchema(PROMPT_SCHEMA)]
