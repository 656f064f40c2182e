"""Read the JSON files of an artifact: untrusted data, checked once against a schema.

The schemas are pydantic models, strict and bounded. Checked data has the declared types, so later code needs no type
checks.
"""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from optkit.errors import UserError

MAX_DEPTH = 64
MAX_SIZE = 1 << 48
AGAIN = "copy the file again, or make it again"

Size = Annotated[int, Field(ge=0, le=MAX_SIZE)]
Name = Annotated[str, Field(max_length=1024, pattern=r"^[^\x00-\x1f\x7f]*$")]


class Schema(BaseModel):
    """A JSON object with exactly the declared keys and types."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class PartSchema(Schema):
    """The used part of a JSON object, with more keys allowed: a file of another version, or of another tool."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


Checked = TypeVar("Checked", bound=Schema)


def read_bounded(file: Path, limit: int) -> bytes:
    """The content of a plain file of at most ``limit`` bytes.

    Raises:
        UserError: the file is missing, unreadable, a directory, or larger.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        raise UserError(
            f"the file can't be read: {error.strerror}", where=str(file), fix="give a file that can be read"
        ) from error
    if len(data) > limit:
        raise UserError(
            f"the file is larger than {limit} bytes", where=str(file), fix="give a file of the expected kind"
        )
    return data


def parse_json(text: bytes, where: str, subject: str = "the file is", fix: str = AGAIN) -> dict[str, Any]:
    """A JSON object from untrusted bytes: no duplicate keys, no unbounded nesting.

    Raises:
        UserError: the bytes are not a JSON object.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{subject} not valid JSON ({error!s:.120})", where=where, fix=fix) from error
    if not isinstance(value, dict):
        raise UserError(f"{subject} not a JSON object", where=where, fix=fix)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate keys")
    return result


def parse_bounded(data: bytes, where: str, subject: str = "the file is", fix: str = AGAIN) -> dict[str, Any]:
    """A JSON object without duplicate keys, lone surrogates, or nesting beyond ``MAX_DEPTH``.

    Raises:
        UserError: the bytes are anything else.
    """
    value = parse_json(data, where, subject, fix)
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [item for node in level for item in children(node)]
        if any(isinstance(item, str) and not is_text(item) for item in level):
            raise UserError(f"{subject} not valid JSON (a lone surrogate)", where=where, fix=fix)
        level = [item for item in level if isinstance(item, (dict, list))]
        if not level:
            return value
    raise UserError(f"{subject} nested more than {MAX_DEPTH} deep", where=where, fix=fix)


def without_nan(value: Any) -> Any:
    """JSON data with None in place of numbers that are not finite."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    return [without_nan(item) for item in value] if isinstance(value, (list, tuple)) else value


def children(node: Any) -> list[Any]:
    """The items of a list; the keys and values of an object."""
    return [*node, *node.values()] if isinstance(node, dict) else node


def is_text(value: str) -> bool:
    """Return True if ``value`` can be written as UTF-8."""
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def check(
    schema: type[Checked], data: Any, where: str, subject: str = "the file is damaged", fix: str = AGAIN
) -> Checked:
    """``data`` as an instance of ``schema``; ``fix`` is the remedy in the error.

    Raises:
        UserError: the first mismatch, with the path in the data.
    """
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(key) for key in first["loc"])
        raise UserError(f"{subject} ({path[:200]}: {first['msg'][:200]})", where=where, fix=fix) from error
