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
        text = body.decode("utf-8")
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_constant)
    except UnicodeDecodeError:
        raise _bad("the request body is not UTF-8") from None
    except (ValueError, RecursionError):
        raise _bad("the request body is not valid JSON") from None
    if not isinstance(data, dict):
        raise _bad("the request body must be a JSON object")
    _check(data, 0, "\\u" in text)
    return data


def _bad(message: str) -> ApiError:
    return ApiError(message, code="invalid_json")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise _bad("the request body has a duplicate key")
    return data


def _constant(name: str) -> None:
    raise _bad(f"{name} is not JSON")


def _check(value: Any, depth: int, escaped: bool) -> None:
    """Refuse what strict JSON text cannot carry safely, in ``value`` and below.

    Args:
        escaped: the text has ``\\u`` escapes. Without one no string can hold NUL or a lone surrogate: UTF-8 has no
            surrogates, and the parser refuses control characters.
    """
    if depth > MAX_DEPTH:
        raise _bad(f"the request body is nested deeper than {MAX_DEPTH}")
    if isinstance(value, str):
        if escaped:
            _check_text(value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise _bad("a number is out of range")
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
        raise _bad("a string contains NUL")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _bad("a string contains a lone surrogate") from None
