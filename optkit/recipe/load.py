"""Recipes from YAML: by name, by path or from text, with overrides, and with the recipes they extend."""

from __future__ import annotations

import importlib.resources
import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from optkit import plugins
from optkit.errors import UserError, nearest
from optkit.plugins import PlugIn, PlugInError
from optkit.recipe.engine_options import ONE_OF_TWO
from optkit.recipe.errors import apply_override, apply_value, explain
from optkit.recipe.extend import EXTENDS, merged
from optkit.recipe.renamed import rename_passes
from optkit.recipe.schema import Recipe
from optkit.recipe.strict_yaml import Document, parse

log = logging.getLogger(__name__)

MAX_BASES = 8  # recipes that a recipe extends, one after the other

Overrides = Sequence[str] | Mapping[str, Any]


def load_recipe(name_or_path: str, overrides: Overrides = ()) -> Recipe:
    """A recipe by name, or a YAML file by path, with ``key.path=value`` overrides.

    Raises:
        UserError: no such recipe, bad YAML, unknown key or bad value.
    """
    label, text, file = read_recipe(name_or_path)
    recipe = parse_recipe(text, label, overrides, file)
    refuse_contradictions(recipe)
    return recipe


def refuse_contradictions(recipe: Recipe) -> None:
    """Refuse contradictions of ``serving``. The recipe of an artifact is not checked: flags of ``optkit serve`` win.

    Raises:
        UserError: SpecPrefill beside a rolling window, or sinks larger than a block.
    """
    serving, block_size = recipe.serving, recipe.runtime.block_size
    if not serving.rolling_window:
        return
    if serving.specprefill:
        where = recipe.document.where(("serving", "specprefill"))
        raise UserError(ONE_OF_TWO, where=where, fix="leave out specprefill or rolling_window")
    if serving.sink_tokens > block_size:
        where = recipe.document.where(("serving", "sink_tokens"))
        what, fix = f"{serving.sink_tokens} tokens are more than a block", f"at most {block_size}"
        raise UserError(f"sink_tokens: {what}", where=where, fix=f"{fix}, runtime.block_size")


def parse_recipe(
    text: str, label: str = "recipe", overrides: Overrides = (), file: Path | None = None
) -> Recipe:
    """A recipe from YAML text.

    Args:
        label: the name of the text's source in errors.
        file: the file of the text, from which paths in ``extends`` start. None refuses ``extends``, as in an artifact,
            whose recipe is complete.
    """
    return recipe_of(parse_document(text, label, file), overrides)


def recipe_of(document: Document, overrides: Overrides = ()) -> Recipe:
    """The recipe in ``document``, which is changed by ``overrides``.

    Raises:
        UserError: unknown key or bad value, in the document or an override.
    """
    if isinstance(overrides, Mapping):
        for path, value in overrides.items():
            apply_value(document, path, value, f"override {path}")
    else:
        for override in overrides:
            apply_override(document, override)
    try:
        recipe = Recipe.model_validate(document.data)
    except ValidationError as error:
        raise explain(error, document) from error
    recipe._document = document
    return recipe


def overridden(recipe: Recipe, overrides: Overrides) -> Recipe:
    """``recipe`` with ``overrides``."""
    return recipe_of(Document(recipe.name, recipe.to_data()), overrides) if overrides else recipe


def parse_document(text: str, label: str, file: Path | None, extending: tuple[Path, ...] = ()) -> Document:
    """The YAML document of a recipe, merged over the recipe it extends.

    Args:
        extending: files of the recipes that extend this one.
    """
    document = parse(text, label)
    if not isinstance(document.data, dict):
        fix = "start from: optkit recipe new"
        raise UserError("a recipe is a mapping of keys to values", where=label, fix=fix)
    rename_passes(document)
    return extended(document, file, extending)


def extended(document: Document, file: Path | None, extending: tuple[Path, ...] = ()) -> Document:
    """``document`` merged over the recipe in its key ``extends``; ``document`` itself without the key.

    Raises:
        UserError: no such recipe, a recipe that extends itself, or too many.
    """
    if EXTENDS not in document.data:
        return document
    where, base = document.where((EXTENDS,)), document.data[EXTENDS]
    if file is None:
        raise UserError("'extends' needs a recipe in a file", where=where, fix="leave it out")
    if not isinstance(base, str):
        raise UserError(f"extends: the name or file of a recipe, got {base!r:.60}", where=where)
    label, text, other = read_base(base, file.parent, where)
    chain = (*extending, file.resolve())
    if other.resolve() in chain:
        raise UserError(f"the recipe extends itself by '{base}'", where=where)
    if len(chain) > MAX_BASES:
        raise UserError(f"more than {MAX_BASES} recipes extend each other", where=where)
    return merged(parse_document(text, label, other, chain), document)


def read_base(base: str, directory: Path, where: str) -> tuple[str, str, Path]:
    """``read_recipe`` of a recipe that another extends: a path starts in ``directory``."""
    path = os.path.normpath(os.path.join(directory, base))
    try:
        return read_recipe(path if base not in shipped_names() and os.path.isfile(path) else base)
    except UserError as error:
        raise UserError(f"extends: {error.what}: '{base}'", where=where, fix=error.fix) from error


def list_recipes() -> list[Recipe]:
    """Every recipe by name, shipped and of plug-ins; a plug-in's recipe with a mistake is a line in the log."""
    found = [load_recipe(name) for name in shipped_names()]
    for name, file in plugin_files().items():
        try:
            found.append(load_recipe(name))
        except UserError as error:
            log.warning("%s: %s", file, error)
    return found


def plugin_files() -> dict[str, Path]:
    """The recipe files of plug-ins, by name; a plug-in that can't be used is a line in the log."""
    found: dict[str, Path] = {}
    for plugin in plugins.installed(plugins.RECIPES):
        try:
            found = recipes_of(plugin) | found
        except PlugInError as error:
            log.warning("%s", error)
    return found


def recipes_of(plugin: PlugIn) -> dict[str, Path]:
    """The recipe files in the package of a plug-in, by name. Only parent packages are imported.

    Raises:
        PlugInError: the package is not there.
    """
    try:
        spec = importlib.util.find_spec(plugin.module)
    except (Exception, SystemExit) as error:
        raise PlugInError(plugin, f"it can't be imported: {type(error).__name__}: {error}") from error
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]
    if not folders:
        raise PlugInError(plugin, f"there is no package {plugin.module} with recipes")
    files = sorted(
        file for folder in folders for file in folder.glob("*.yaml") if not file.name.startswith("_")
    )
    return {file.stem: file for file in files}


def shipped_names() -> list[str]:
    """Names of the recipes in ``optkit.recipes``."""
    names = [file.name for file in importlib.resources.files("optkit.recipes").iterdir()]
    return sorted(n.removesuffix(".yaml") for n in names if n.endswith(".yaml") and not n.startswith("_"))


def read_recipe(name_or_path: str) -> tuple[str, str, Path]:
    """Label, text and file of a recipe.

    A shipped name wins over a file of that name without ``./``, and a file over the name of a plug-in's recipe.
    """
    if name_or_path in shipped_names():
        file = importlib.resources.files("optkit.recipes") / f"{name_or_path}.yaml"
        return f"{name_or_path}.yaml", file.read_text(encoding="utf-8"), Path(str(file))
    path = Path(name_or_path)
    if not os.path.isfile(path):  # unlike Path.is_file, false for a name too long to be one
        others = plugin_files()
        if name_or_path not in others:
            names = [*shipped_names(), *others]
            fix = f"give a YAML file or the name of a recipe ({nearest(name_or_path, names)})"
            raise UserError("no such recipe", where=name_or_path, fix=fix)
        path = others[name_or_path]
    try:
        return str(path), path.read_text(encoding="utf-8"), path
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"cannot be read as UTF-8 text: {error}", where=str(path)) from error
