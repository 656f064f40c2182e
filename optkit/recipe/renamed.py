"""Former names of passes, as in recipes, overrides and reports of earlier versions.

A former name is replaced where data is read, with a line in the log that gives both names. All other code has the
present names alone.
"""

from __future__ import annotations

import logging

from optkit.errors import UserError, printable
from optkit.recipe.strict_yaml import Document, KeyPath

PRESENT_NAMES = {"prune": "prune_ffn", "prune_rows": "select_logits_rows"}

log = logging.getLogger(__name__)


def present_name(name: str) -> str:
    """The present name of pass ``name``; a label behind ``@`` stays."""
    own, at, label = name.partition("@")
    return PRESENT_NAMES.get(own, own) + at + label


def present_path(path: KeyPath) -> KeyPath:
    """``path`` in a recipe, with the present name of a pass."""
    if path[:1] != ("passes",) or len(path) < 2:
        return path
    return ("passes", present_name(str(path[1])), *path[2:])


def note_former_name(path: KeyPath, where: str) -> None:
    """Log a former name of a pass in ``path``, found at ``where``."""
    if path != present_path(path):
        log.warning("%s: pass '%s' is now '%s'", printable(where), path[1], present_path(path)[1])


def rename_passes(document: Document) -> None:
    """Replace former names of passes in ``document``, in place.

    Raises:
        UserError: a pass under both names.
    """
    passes = document.data.get("passes")
    if not isinstance(passes, dict):
        return
    for former in [name for name in passes if present_name(name) != name]:
        where, name = document.where(("passes", former)), present_name(former)
        if name in passes:
            raise UserError(
                f"'{former}' is the former name of '{name}', which the recipe has too",
                where=where,
                fix=f"leave out '{former}'",
            )
        note_former_name(("passes", former), where)
    document.data["passes"] = {present_name(name): options for name, options in passes.items()}
    document.places = {present_path(path): place for path, place in document.places.items()}
