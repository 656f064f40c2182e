"""A JSON file, rewritten after each measurement: an interrupted run can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Results:
    """``stages`` holds the rows of each stage by name; ``environment`` holds their origin.

    Rows of a resumed run are kept on the same machine with the same versions.
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
        """Return True for a row to keep. A failed measurement is repeated.

        A measurement with another table of kernels (``table``) than the present table is repeated as well.
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
    """The row of ``measure``. An exception becomes a row with the error, so later measurements run."""
    try:
        return measure()
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
