"""Recipe overrides, and pydantic's errors rewritten with the names and lines of the file.

pydantic reports the error and the path in the data. The ``Document`` knows the line, or the ``--set`` argument, of
each path. Both together make the error line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

from optkit.errors import UserError, nearest
from optkit.recipe import schema
from optkit.recipe.renamed import note_former_name, present_path
from optkit.recipe.strict_yaml import Document, KeyPath, parse

_SECTIONS: dict[KeyPath, type[BaseModel]] = {
    (): schema.Recipe,
    ("workload",): schema.Workload,
    ("slo",): schema.Slo,
    ("runtime",): schema.Runtime,
    ("serving",): schema.Serving,
    ("evaluation",): schema.Evaluation,
    ("files",): schema.Files,
    ("accept",): schema.Accept,
}


def apply_override(document: Document, override: str) -> None:
    """Set ``key.path=value`` in ``document.data``; the value is YAML.

    Raises:
        UserError: no ``=``, an unknown path, or a pass missing from the recipe.
    """
    label = "--set " + "".join(letter if letter.isprintable() else "?" for letter in override)
    dotted, equals, text = override.partition("=")
    if not equals:
        raise UserError("an override is key.path=value", where=label, fix="as in runtime.max_num_seqs=4")
    apply_value(document, dotted, parse(text, label).data, label)


def apply_value(document: Document, dotted: str, value: Any, label: str) -> None:
    """Set the value at ``key.path`` in ``document.data``; ``label`` names the override in errors.

    Raises:
        UserError: an unknown path, or a pass missing from the recipe.
    """
    path = tuple(dotted.strip().split("."))
    if not all(path):
        raise UserError("an override is key.path=value", where=label, fix="as in runtime.max_num_seqs=4")
    note_former_name(path, label)
    path = tuple(map(str, present_path(path)))
    _check_path(document.data, path, label)
    section = document.data
    for key in path[:-1]:
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            raise UserError(f"'{key}' holds a value, not keys", where=label)
    section[path[-1]] = value
    document.overridden[path] = label


def _check_path(data: dict[str, Any], path: tuple[str, ...], label: str) -> None:
    known = list(schema.Recipe.model_fields)
    if path[0] not in known:
        raise UserError(f"unknown key '{path[0]}'", where=label, fix=nearest(path[0], known))
    if path[0] == "passes":
        _check_pass(data.get("passes"), path, label)
        known, rest = list(schema.Accept.model_fields), path[3:] if path[2:3] == ("accept",) else ()
    else:
        model = _SECTIONS.get(path[:1])
        known, rest = list(model.model_fields) if model else [], path[1:]
    if rest and rest[0] not in known:
        fix = nearest(rest[0], known) if known else f"'{path[0]}' has no keys below it"
        raise UserError(f"unknown key '{'.'.join(path)}'", where=label, fix=fix)


def _check_pass(passes: Any, path: tuple[str, ...], label: str) -> None:
    present = list(passes) if isinstance(passes, dict) else []
    if len(path) < 3:
        raise UserError("name the pass and its option", where=label, fix="as in passes.int8.lm_head=false")
    if path[1] not in present:
        fix = f"the recipe has: {', '.join(map(str, present))}" if present else "the recipe has no passes"
        raise UserError(f"the pass '{path[1]}' is not in this recipe", where=label, fix=fix)


def explain(
    error: ValidationError, document: Document, prefix: KeyPath = (), known: Iterable[str] = ()
) -> UserError:
    """The most useful part of ``error`` as a ``UserError`` with place, key and allowed values.

    An unknown key comes first, since a misspelt key also explains a missing key.

    Args:
        error: from validating ``document.data`` or the part at ``prefix``.
        document: the source of the data.
        prefix: path of the validated part.
        known: keys allowed there, for a model outside the recipe schema.
    """
    complaints = error.errors(include_url=False, include_context=False)
    unknown = [complaint for complaint in complaints if complaint["type"] == "extra_forbidden"]
    first = (unknown or complaints)[0]  # a misspelt key also explains a missing key
    path = prefix + _written_path(first["loc"], document.data)
    where, dotted = document.where(path), ".".join(map(str, path))
    if first["type"] == "extra_forbidden":
        candidates = list(known) or list(_section_of(path).model_fields)
        return UserError(f"unknown key '{dotted}'", where=where, fix=nearest(str(path[-1]), candidates))
    if first["type"] == "missing":
        return UserError(f"the key '{dotted}' is missing", where=where)
    message = _plain(first["msg"])
    return UserError(f"{dotted}: {message}, got {first['input']!r:.80}" if dotted else message, where=where)


def _plain(message: str) -> str:
    """pydantic's message without the words of Python's type system."""
    message = message.removeprefix("Value error, ").replace("a valid tuple", "a list")
    return re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping of keys to values", message)


def _section_of(path: KeyPath) -> type[BaseModel]:
    """The pydantic model with the key at ``path``."""
    if path[0] == "passes":
        return schema.Accept
    return _SECTIONS.get(path[:-1], schema.Recipe)


def _written_path(loc: tuple[str | int, ...], data: Any) -> KeyPath:
    """pydantic's location as the path in the file: ``passes`` is a list in the model and a mapping in the file."""
    if len(loc) < 2 or loc[0] != "passes" or not isinstance(data.get("passes"), dict):
        return loc
    names = list(data["passes"])
    name, rest = names[int(loc[1])], loc[2:]
    if len(rest) > 2 and rest[0] == "one_of":  # ("one_of", candidate, pass, ...)
        candidate = data["passes"][name]["one_of"][int(rest[1])]
        rest = (*rest[:2], list(candidate)[int(rest[2])], *rest[3:])
    return ("passes", name, *rest)
