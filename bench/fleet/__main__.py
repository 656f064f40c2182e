"""Runs a figure of the fleet: ``python -m bench.fleet NAME ...``; without a name the list of figures.

A figure is a module of the package with ``main(arguments) -> exit code``. Exit code 1: a bound is missed.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence

import bench.fleet


def figures() -> dict[str, str]:
    """Names of figures with the first line of their docstrings."""
    found = {}
    for module in pkgutil.iter_modules(bench.fleet.__path__):
        if module.name.startswith("_"):
            continue
        loaded = importlib.import_module(f"bench.fleet.{module.name}")
        if hasattr(loaded, "main"):
            found[module.name] = (loaded.__doc__ or "").partition("\n")[0]
    return found


def main(arguments: Sequence[str]) -> int:
    known = figures()
    if not arguments or arguments[0] not in known:
        width = max(map(len, known))
        print(
            "python -m bench.fleet NAME ...",
            *(f"  {name:{width}}  {known[name]}" for name in known),
            sep="\n",
        )
        return 0 if arguments[:1] in ([], ["--help"], ["-h"]) else 2
    return int(importlib.import_module(f"bench.fleet.{arguments[0]}").main(list(arguments[1:])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
