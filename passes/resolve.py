"""The passes' side of a recipe: unknown passes, each pass's own options, and their JSON Schema.

Importing a pass may import torch, so nothing here is needed to read, list or show a recipe.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from optkit.errors import UserError, nearest
from optkit.passes.base import Stage
from optkit.recipe.errors import explain
from optkit.recipe.schema import PassEntry, Recipe
from optkit.recipe.strict_yaml import Document


class ResolvedPass(NamedTuple):
    """A pass entry with class and validated ``Config``."""

    entry: PassEntry
    pass_class: Any
    config: Any


def resolve_passes(recipe: Recipe) -> list[ResolvedPass]:
    """Load each pass of ``recipe`` and validate the options with the pass's ``Config``.

    Raises:
        UserError: unknown pass, unknown option, bad value or order, with file and line.
    """
    return resolve_entries(recipe.passes, recipe.document)


def resolve_entries(entries: Sequence[PassEntry], document: Document) -> list[ResolvedPass]:
    """Resolve every entry and check the order of stages (``Stage``)."""
    resolved = [resolve_entry(entry, document) for entry in entries]
    for before, after in itertools.pairwise(resolved):
        if after.pass_class.stage < before.pass_class.stage:
            raise UserError(
                f"'{after.entry.name}' must come before '{before.entry.name}'",
                where=document.where(("passes", after.entry.name)),
                fix=f"the order is: {', '.join(stage.name.lower() for stage in Stage)}",
            )
    return resolved


def resolve_entry(entry: PassEntry, document: Document) -> ResolvedPass:
    """Look up the pass in the table and validate ``entry.config`` with the pass's ``Config``."""
    from optkit import passes  # type: ignore[attr-defined]

    path = ("passes", entry.name)
    if entry.name not in passes.names():
        fix = nearest(entry.name, passes.names())
        raise UserError(f"unknown pass '{entry.name}'", where=document.where(path), fix=fix)
    pass_class = passes.load(entry.name)
    model: type[BaseModel] = pass_class.Config
    try:
        config = model.model_validate(copy.deepcopy(entry.config))
    except ValidationError as error:
        raise explain(error, document, path, [*model.model_fields, "accept"]) from error
    return ResolvedPass(entry, pass_class, config)


def recipe_json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe's YAML form, with each pass's options where the passes can be imported."""
    schema = Recipe.model_json_schema()
    definitions = schema["$defs"]
    del definitions["PassEntry"]
    schema["properties"]["passes"] = passes_schema(definitions)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def passes_schema(definitions: dict[str, Any]) -> dict[str, Any]:
    """Schema of the ``passes`` mapping; the passes' definitions are added to ``definitions``."""
    schema: dict[str, Any] = {"type": "object", "default": {}, "description": "The pipeline, in this order."}
    try:
        from optkit import passes  # type: ignore[attr-defined]

        models = {name: passes.load(name).Config for name in passes.names()}
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("optkit"):
            raise
        # Without torch: any pass, any options.
        return schema | {"additionalProperties": {"type": ["object", "null"]}}
    properties = {name: _options_schema(name, model, definitions) for name, model in models.items()}
    return schema | {"properties": properties, "additionalProperties": False}


def _options_schema(name: str, model: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    options = model.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
    for key, value in options.pop("$defs", {}).items():
        definitions[f"{name}.{key}"] = value
    options.setdefault("properties", {})["accept"] = {"$ref": "#/$defs/Accept"}
    return {"anyOf": [options, {"type": "null"}]}
