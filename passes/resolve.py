"""The passes' side of a recipe: unknown passes, each pass's own options, and their JSON Schema.

Importing a pass may import torch, so nothing here is needed to read, list or show a recipe.
"""

from __future__ import annotations

import copy
import difflib
import logging
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from optkit.errors import UserError, nearest
from optkit.passes.base import Stage
from optkit.plugins import PlugInError
from optkit.recipe.errors import explain
from optkit.recipe.extend import EXTENDS, LEFT_OUT
from optkit.recipe.schema import LABEL, Keep, PassEntry, Recipe
from optkit.recipe.strict_yaml import Document, KeyPath

log = logging.getLogger(__name__)

LABELLED = rf"{LABEL}[a-z0-9][a-z0-9_.-]{{0,63}}"
PASS_KEY = re.compile(rf"[^{LABEL}]+({LABELLED})?", re.ASCII)


class ResolvedPass(NamedTuple):
    """A pass entry with class and validated ``Config``."""

    entry: PassEntry
    pass_class: Any
    config: Any


class Alternatives(NamedTuple):
    """Candidates for a place of the pipeline, each a list of passes in order; ``name`` is the recipe's label."""

    name: str
    candidates: list[list[ResolvedPass]]


Resolved = ResolvedPass | Alternatives


def resolve_passes(recipe: Recipe) -> list[Resolved]:
    """Load each pass of ``recipe`` and validate the options with the pass's ``Config``.

    Raises:
        UserError: unknown pass, unknown option, bad value or order, with file and line.
    """
    return resolve_entries(recipe.passes, recipe.document)


def resolve_entries(entries: Sequence[PassEntry], document: Document) -> list[Resolved]:
    """Resolve every entry and check the order of stages (``Stage``)."""
    resolved = [
        resolve_alternatives(entry, document)
        if entry.one_of
        else resolve_entry(entry, document, ("passes", entry.name))
        for entry in entries
    ]
    check_order(resolved, document, ("passes",))
    return resolved


def resolve_alternatives(entry: PassEntry, document: Document) -> Alternatives:
    """Resolve the candidates of ``entry`` and check the order of stages in each."""
    from optkit import passes  # type: ignore[attr-defined]

    where = document.where(("passes", entry.name))
    if passes.is_known(entry.pass_name):
        raise UserError(
            f"'{entry.pass_name}' is a pass", where=where, fix="give 'one_of' a label of your own"
        )
    candidates = []
    for index, candidate in enumerate(entry.one_of or ()):
        path = ("passes", entry.name, "one_of", index)
        resolved = [resolve_entry(one, document, (*path, one.name)) for one in candidate]
        check_order(resolved, document, path)
        candidates.append(resolved)
    return Alternatives(entry.name, candidates)


def check_order(resolved: Sequence[Resolved], document: Document, path: KeyPath) -> None:
    """Refuse a pass whose last stage is before the stage of a pass above; ``path`` is that of the passes.

    Raises:
        UserError: at the pass in ``document``.
    """
    latest: ResolvedPass | None = None
    for one in resolved:
        early = min(members(one), key=last_place)
        if latest is not None and last_place(early) < latest.pass_class.stage:
            raise UserError(
                f"'{early.entry.name}' must come before '{latest.entry.name}'",
                where=document.where((*path, name_of(one))),
                fix=f"the order is: {', '.join(stage.name.lower() for stage in Stage)}",
            )
        late = max(members(one), key=lambda member: member.pass_class.stage)
        if latest is None or late.pass_class.stage >= latest.pass_class.stage:
            latest = late


def last_place(resolved: ResolvedPass) -> Stage:
    """The last stage in which the pass may come."""
    last: Stage | None = resolved.pass_class.last_stage
    return last or resolved.pass_class.stage


def members(resolved: Resolved) -> list[ResolvedPass]:
    """The passes of all candidates; a pass is the only candidate for its place."""
    if isinstance(resolved, Alternatives):
        return [member for candidate in resolved.candidates for member in candidate]
    return [resolved]


def name_of(resolved: Resolved) -> str:
    return resolved.name if isinstance(resolved, Alternatives) else resolved.entry.name


def resolve_entry(entry: PassEntry, document: Document, path: KeyPath) -> ResolvedPass:
    """Look up the pass in the table and validate ``entry.config``, at ``path``, with the pass's ``Config``."""
    from optkit import passes  # type: ignore[attr-defined]

    if not passes.is_known(entry.pass_name):
        fix = nearest(entry.pass_name, passes.names())
        if written := difflib.get_close_matches("one_of", entry.config):
            fix = f"write 'one_of' in place of '{written[0]}' for a label with candidates"
        raise UserError(f"unknown pass '{entry.pass_name}'", where=document.where(path), fix=fix)
    if not PASS_KEY.fullmatch(entry.name):
        fix = f"write {entry.pass_name}{LABEL}LABEL with small letters, digits, '-', '_' or '.'"
        raise UserError(f"'{entry.name}' has no good label", where=document.where(path), fix=fix)
    pass_class = passes.load(entry.pass_name)
    model: type[BaseModel] = pass_class.Config
    try:
        config = model.model_validate(copy.deepcopy(entry.config))
    except ValidationError as error:
        raise explain(error, document, path, [*model.model_fields, "accept", "keep"]) from error
    return ResolvedPass(entry, pass_class, config)


def recipe_json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe's YAML form, with each pass's options where the passes can be imported."""
    schema = Recipe.model_json_schema()
    definitions = schema["$defs"]
    del definitions["PassEntry"]
    schema["properties"]["passes"] = passes_schema(definitions)
    schema["properties"][EXTENDS] = {
        "type": "string",
        "description": "The recipe, by name or file, to which this file is the changes.",
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def usable(name: str) -> Any:
    """The class of pass ``name``; None for a plug-in that can't be used, with a line in the log."""
    from optkit import passes  # type: ignore[attr-defined]

    try:
        return passes.load(name)
    except PlugInError as error:
        log.warning("%s", error)
        return None


def passes_schema(definitions: dict[str, Any]) -> dict[str, Any]:
    """Schema of the ``passes`` mapping; the passes' definitions are added to ``definitions``."""
    schema: dict[str, Any] = {"type": "object", "default": {}, "description": "The pipeline, in this order."}
    try:
        from optkit import passes  # type: ignore[attr-defined]

        models = {name: found.Config for name in passes.names() if (found := usable(name))}
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("optkit"):
            raise
        # Without torch: any pass, any options.
        return schema | {"additionalProperties": {"type": ["object", "null"]}}
    options = {name: _options_schema(name, model, definitions) for name, model in models.items()}
    again = {f"^{re.escape(name)}{LABELLED}$": {"$ref": f"#/$defs/pass.{name}"} for name in options}
    definitions |= {f"pass.{name}": found for name, found in options.items()}
    named = {name: {"$ref": f"#/$defs/pass.{name}"} for name in options}
    candidate = {
        "type": "object",
        "properties": named,
        "patternProperties": again,
        "additionalProperties": False,
    }
    candidate |= {"minProperties": 1, "maxProperties": 8}
    label = {
        "type": "object",
        "description": "Candidates for this place; the best measured is kept.",
        "properties": {"one_of": {"type": "array", "minItems": 1, "maxItems": 16, "items": candidate}},
        "required": ["one_of"],
        "additionalProperties": False,
    }
    left_out = {"const": LEFT_OUT, "description": "With extends: leave this pass of the extended recipe out."}
    single = {name: {"anyOf": [found, left_out]} for name, found in named.items()}
    repeated = {pattern: {"anyOf": [found, left_out]} for pattern, found in again.items()}
    other = {"anyOf": [label, left_out]}
    return schema | {"properties": single, "patternProperties": repeated, "additionalProperties": other}


def _options_schema(name: str, model: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    options = model.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
    for key, value in options.pop("$defs", {}).items():
        definitions[f"{name}.{key}"] = value
    properties = options.setdefault("properties", {})
    if names := getattr(model, "overridable", ()):
        of_layer = {name: properties[name] for name in names}
        properties["overrides"]["additionalProperties"] = {
            "type": "object",
            "properties": of_layer,
            "additionalProperties": False,
        }
    properties["accept"] = {"$ref": "#/$defs/Accept"}
    properties["keep"] = {"enum": list(get_args(Keep)), "default": "unless_worse"}
    return {"anyOf": [options, {"type": "null"}]}
