"""Machines to plan for, by name: the rows that ship with optkit, rows of the user, and the machine at hand.

A user adds rows in YAML, in the form of the shipped ``hardware.yaml``: in ``hardware.yaml`` of the configuration
directory (``$XDG_CONFIG_HOME/optkit``, by default ``~/.config/optkit``), or in a file given with ``--hardware``. A
row of the user with the name of a shipped one replaces it. Files are checked strictly; an error names file, line and
remedy.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from optkit.errors import UserError, nearest
from optkit.machine.hardware import NAME, PREFIXES, Rates, Row, rows
from optkit.machine.present import planning_target
from optkit.machine.target import Target, cpu_model, get_target
from optkit.recipe.strict_yaml import Document, parse

HERE = "here"  # the machine at hand
FILE_NAME = "hardware.yaml"
MAX_BYTES = 1 << 20
FIX = "give a YAML file as in docs/planning.md"


@dataclass(frozen=True)
class Machine:
    """A machine to plan for.

    Attributes:
        name: as users name it.
        row: the figures with their source; None for measured ceilings.
        note: a line about the choice, or empty.
    """

    name: str
    title: str
    target: Target
    row: Row | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The machine as JSON data, with sources."""
        from dataclasses import asdict

        row = self.row.model_dump(mode="json", exclude={"rates"}) if self.row else None
        return {"name": self.name, "title": self.title, "target": asdict(self.target), "row": row}

    @property
    def source(self) -> str:
        """The origin of the figures, with the names of unverified figures."""
        if self.row is None:
            return (
                f"ceilings {'measured here' if self.target.source == 'measured' else 'from the data sheet'}"
            )
        checked = f", compared {self.row.compared}" if self.row.compared else ""
        doubt = f"; not verified: {', '.join(self.row.unverified)}" if self.row.unverified else ""
        return f"{self.row.source}{checked}{doubt}"


def machine(name: str | None, recipe_target: str, hardware: Path | None = None) -> Machine:
    """The machine called ``name``, as ``h100``, ``cuda-h100`` or ``here``.

    None is the machine of the recipe: the CPU at hand, the local GPU, or the GPU named by the recipe.

    Raises:
        UserError: an unknown machine, or a wrong row of a user.
    """
    known = all_rows(hardware)
    if name is None:
        return of_recipe(recipe_target, known)
    if name in (HERE, "cpu"):
        return Machine(HERE, f"this machine, {cpu_model()}", get_target("cpu"))
    short = short_name(name, known)
    if short not in known:
        fix = nearest(name, [HERE, *known])
        raise UserError(f"unknown machine '{name}'", where="--target", fix=fix)
    row = known[short]
    return Machine(short, row.title, row.target(short), row, row.note or "")


def of_recipe(recipe_target: str, known: dict[str, Row]) -> Machine:
    """The machine of a recipe with the target ``recipe_target``."""
    target, note = planning_target(recipe_target)
    if target.kind == "cpu":
        return Machine(HERE, f"this machine, {cpu_model()}", target)
    short = short_name(target.name, known)
    row = known.get(short)
    if row is None or target.source == "measured":
        return Machine(short, target.name, target, None, note)
    sized = replace(row.target(short), memory_bytes=target.memory_bytes)
    return Machine(short, row.title, sized, row, note)


def short_name(name: str, known: dict[str, Row]) -> str:
    """``h100`` of ``cuda-h100``; a name without a kind in front is returned unchanged."""
    if name in known:
        return name
    found = (name.removeprefix(prefix) for prefix in PREFIXES.values() if name.startswith(prefix))
    return next(found, name)


def all_rows(hardware: Path | None = None) -> dict[str, Row]:
    """The rows of optkit and of the user, by name; of equal names the file given last counts.

    Raises:
        UserError: a wrong row, or no file ``hardware``.
    """
    found = dict(rows())
    if (own := user_file()).is_file():
        found |= read_rows(own)
    return found | (read_rows(hardware) if hardware is not None else {})


def user_file() -> Path:
    """The file of the user's own table, which may be missing."""
    default = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return default / "optkit" / FILE_NAME


def read_rows(file: Path) -> dict[str, Row]:
    """The rows of a YAML file.

    Raises:
        UserError: the file can't be read, or a row is wrong; with file, line and remedy.
    """
    try:
        if file.stat().st_size > MAX_BYTES:
            raise UserError(f"larger than {MAX_BYTES} bytes", where=str(file), fix=FIX)
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the table of hardware can't be read: {getattr(error, 'strerror', None) or error}",
            where=str(file),
            fix=FIX,
        ) from error
    document = parse(text, str(file))
    if not isinstance(document.data, dict) or not document.data:
        raise UserError(
            "needs a mapping of names to rows", where=str(file), fix="docs/planning.md has an example"
        )
    return {name: checked(name, body, document) for name, body in document.data.items()}


def checked(name: str, body: Any, document: Document) -> Row:
    """The row ``name``.

    Raises:
        UserError: with file and line of the key.
    """
    if not re.fullmatch(NAME, name) or name in (HERE, "cpu"):
        raise UserError(
            f"'{name}' is no name of a row",
            where=document.where((name,)),
            fix="use small letters, digits, . _ -",
        )
    try:
        return Row.model_validate(body)
    except ValidationError as error:
        found = error.errors(include_url=False)
        first = min(
            found, key=lambda one: one["type"] != "extra_forbidden"
        )  # a misspelt key explains a missing one
        path = (name, *first["loc"])
        raise UserError(problem(first, path), where=document.where(path), fix=remedy(first)) from error


def problem(error: Any, path: tuple[str | int, ...]) -> str:
    """The problem of a row in words."""
    key = ".".join(map(str, path))
    if error["type"] == "extra_forbidden":
        return f"unknown key '{key}'"
    if error["type"] == "missing":
        return f"'{key}' is missing"
    text = str(error["msg"]).removeprefix("Value error, ")
    return f"'{key}': {text[:1].lower()}{text[1:]}, got {error.get('input')!r:.60}"


def remedy(error: Any) -> str | None:
    """The nearest key for an unknown one; the place of the example otherwise."""
    if error["type"] == "extra_forbidden":
        known = Rates.model_fields if "rates" in error["loc"] else Row.model_fields
        return nearest(str(error["loc"][-1]), known)
    return "docs/planning.md has an example"
