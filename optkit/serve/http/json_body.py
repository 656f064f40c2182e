"""The bytes of a body to JSON, strictly.

Python's parser accepts more than JSON and repairs invalid input: NaN, duplicate keys (the last value wins, so a checker
in front and the server behind can see different requests), lone surrogates (which no UTF-8 text has, and which Rust
libraries refuse by panicking), integers of any length. Each is a 400 here, and so are NUL and nesting deeper
than any request needs.
"""

from __future__ import annotations

import json
import math
from typing import Any

from optkit.serve.http.errors import ApiError

MAX_DEPTH = 64


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object, strictly by RFC 8259 and RFC 7493 (I-JSON).

    Raises:
        ApiError: 400 with the reason.
    """
    try:
        return object_in(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise _bad("is not UTF-8") from None
    except BadJson as error:
        raise _bad(str(error)) from None


def object_in(text: str, repeats: bool = False) -> dict[str, Any]:
    """A JSON object as ``parse_object`` reads it: also for JSON in the strings of a body, and for that of a model.

    Args:
        repeats: a key may come twice, and the last value counts. Models write such objects, and no second reader
            stands in front.

    Raises:
        BadJson: with the reason, a phrase behind the name of the text.
    """
    try:
        data = json.loads(text, object_pairs_hook=None if repeats else _unique, parse_constant=_constant)
    except BadJson:
        raise
    except (ValueError, RecursionError):
        raise BadJson("is not valid JSON") from None
    if not isinstance(data, dict):
        raise BadJson("must be a JSON object")
    _check(data, 0, "\\u" in text)
    return data


class BadJson(ValueError):
    """A text is no JSON object, or holds what strict JSON can't carry."""


def _bad(reason: str) -> ApiError:
    return ApiError(f"the request body {reason}", code="invalid_json")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise BadJson("has a duplicate key")
    return data


def _constant(name: str) -> None:
    raise BadJson(f"has {name}, which is not JSON")


def _check(value: Any, depth: int, escaped: bool) -> None:
    """Refuse what strict JSON text cannot carry safely, in ``value`` and below.

    Args:
        escaped: the text has ``\\u`` escapes. Without one no string can hold NUL or a lone surrogate: UTF-8 has no
            surrogates, and the parser refuses control characters.
    """
    if depth > MAX_DEPTH:
        raise BadJson(f"is nested deeper than {MAX_DEPTH}")
    if isinstance(value, str):
        if escaped:
            _check_text(value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadJson("has a number out of range")
    elif isinstance(value, dict):
        for key, item in value.items():
            if escaped:
                _check_text(key)
            _check(item, depth + 1, escaped)
    elif isinstance(value, list) and set(map(type, value)) != {int}:
        for item in value:
            _check(item, depth + 1, escaped)


def _check_text(text: str) -> None:
    if "\0" in text:
        raise BadJson("has a string with NUL")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadJson("has a string with a lone surrogate") from None
