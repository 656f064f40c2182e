"""Recipes from YAML: by name, by path or from text, with overrides."""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from optkit.errors import UserError, nearest
from optkit.recipe.errors import apply_override, explain
from optkit.recipe.renamed import rename_passes
from optkit.recipe.schema import Recipe
from optkit.recipe.strict_yaml import parse


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """A shipped recipe by name, or a YAML file by path, with ``key.path=value`` overrides.

    Raises:
        UserError: no such recipe, bad YAML, unknown key or bad value.
    """
    label, text = read_recipe(name_or_path)
    return parse_recipe(text, label, overrides)


def parse_recipe(text: str, label: str = "recipe", overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from YAML text; ``label`` is what errors call the place it came from."""
    document = parse(text, label)
    if not isinstance(document.data, dict):
        fix = "start from: optkit recipe new"
        raise UserError("a recipe is a mapping of keys to values", where=label, fix=fix)
    rename_passes(document)
    for override in overrides:
        apply_override(document, override)
    try:
        recipe = Recipe.model_validate(document.data)
    except ValidationError as error:
        raise explain(error, document) from error
    recipe._document = document
    return recipe


def list_recipes() -> list[Recipe]:
    """Every shipped recipe, by name."""
    return [load_recipe(name) for name in shipped_names()]


def shipped_names() -> list[str]:
    """Names of the recipes in ``optkit.recipes``."""
    names = [file.name for file in importlib.resources.files("optkit.recipes").iterdir()]
    return sorted(n.removesuffix(".yaml") for n in names if n.endswith(".yaml") and not n.startswith("_"))


def read_recipe(name_or_path: str) -> tuple[str, str]:
    """Label and text of a recipe; a shipped name wins over a file of that name without ``./``."""
    if name_or_path in shipped_names():
        file = importlib.resources.files("optkit.recipes") / f"{name_or_path}.yaml"
        return f"{name_or_path}.yaml", file.read_text(encoding="utf-8")
    path = Path(name_or_path)
    if not os.path.isfile(path):  # unlike Path.is_file, false for a name too long to be one
        fix = f"give a YAML file or a shipped recipe ({nearest(name_or_path, shipped_names())})"
        raise UserError("no such recipe", where=name_or_path, fix=fix)
    try:
        return str(path), path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"cannot be read as UTF-8 text: {error}", where=str(path)) from error
