"""``optkit.recipe``: a recipe by name, from a file, or built in Python. ``optkit recipe check`` checks the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.api.guard import guarded
from optkit.errors import UserError

if TYPE_CHECKING:
    from optkit.recipe.load import Overrides
    from optkit.recipe.schema import Recipe
    from optkit.recipe.strict_yaml import Document

NAME = "custom"  # of a recipe built in Python without a name


@guarded
def recipe(
    base: str | os.PathLike[str] | None = None,
    /,
    *,
    overrides: Overrides = (),
    **sections: Any,
) -> Recipe:
    """A checked recipe: ``base`` alone, ``base`` with changes, or made of ``sections``.

    Args:
        base: the name of a recipe, or a YAML file. With ``sections`` the result extends ``base``, as a file with
            ``extends: base`` does: sections and the options of passes are merged, and ``False`` in the place of a
            pass's options leaves the pass out.
        overrides: single values: ``{"runtime.max_num_seqs": 4}``.
        sections: the keys of a recipe file: ``name``, ``passes``, ``workload``, ``accept`` and the rest.

    Raises:
        UserError: no recipe of the name, an unknown key or pass, a bad value, or passes in the wrong order.
    """
    from optkit.passes.resolve import resolve_passes
    from optkit.recipe.load import load_recipe, recipe_of

    if base is not None and not sections:
        found = load_recipe(os.fspath(base), overrides)
    else:
        found = recipe_of(built(base, sections), overrides)
    resolve_passes(found)
    return found


def built(base: str | os.PathLike[str] | None, sections: Mapping[str, Any]) -> Document:
    """The document of ``sections``, merged over the recipe ``base``."""
    from optkit.recipe.extend import EXTENDS
    from optkit.recipe.load import extended
    from optkit.recipe.renamed import rename_passes
    from optkit.recipe.strict_yaml import Document

    data: dict[str, Any] = {"schema_version": 1, "name": NAME} | {
        key: plain(v) for key, v in sections.items()
    }
    if base is not None:
        if EXTENDS in data:
            raise UserError(
                "give the base once: as the first argument, or as 'extends'", where="optkit.recipe"
            )
        data[EXTENDS] = os.fspath(base)
    document = Document("optkit.recipe", data)
    rename_passes(document)
    return extended(document, Path.cwd() / "optkit.recipe")


def plain(value: Any) -> Any:
    """``value`` as the data of a YAML file: mappings as dicts, tuples as lists, paths as text."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
