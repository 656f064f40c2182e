"""One JSON file, written anew after each measurement: a run that is cut short can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Results:
    """``stages`` holds the rows of each stage by name; ``environment`` says where they come from.

    Rows of a resumed run are kept if it was the same machine and the same versions.
    """

    def __init__(self, file: Path, environment: Row) -> None:
        self.file = file
        self.data: Row = {"environment": environment, "stages": {}}
        if file.exists():
            before = json.loads(file.read_text("utf-8"))
            if before.get("environment", {}).get("same") == environment.get("same"):
                self.data["stages"] = before["stages"]
        self.save()

    def rows(self, stage: str) -> dict[str, Row]:
        return self.data["stages"].setdefault(stage, {})

    def has(self, stage: str, name: str) -> bool:
        """Whether there is a row that need not be measured again; what failed is tried again.

        So is what ran by another table of kernels (``table``) than the one there is now.
        """
        row = self.rows(stage).get(name)
        table = self.data["environment"].get("table")
        return row is not None and "error" not in row and row.get("table", table) == table

    def put(self, stage: str, name: str, row: Row) -> None:
        self.rows(stage)[name] = row
        self.save()

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self.file)


def attempt(measure: Callable[[], Row]) -> Row:
    """The row of ``measure``. Whatever goes wrong is a row too: one measurement must not cost the others."""
    try:
        return measure()
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
