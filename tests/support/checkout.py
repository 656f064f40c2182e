"""Files of the checkout, without environments and results of ``make``."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MADE = {"build", "dist", "artifact"}  # at the top, beside folders with a dot


def files(*suffixes: str, root: Path = ROOT) -> list[Path]:
    """Paths with one of ``suffixes`` below ``root``, sorted."""
    found = []
    for folder, folders, names in os.walk(root):
        if folder == str(root):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in MADE]
        found += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return sorted(found)
