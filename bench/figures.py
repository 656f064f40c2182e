"""Command lines of figures, and of a package of figures: one module a figure with ``main(arguments) -> exit code``."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Sequence
from types import ModuleType


def figures(package: ModuleType) -> dict[str, str]:
    """Names of a package's figures with the first line of their docstrings."""
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("_"):
            continue
        loaded = importlib.import_module(f"{package.__name__}.{module.name}")
        if hasattr(loaded, "main"):
            found[module.name] = (loaded.__doc__ or "").partition("\n")[0]
    return found


def run(package: ModuleType, arguments: Sequence[str]) -> int:
    """Runs the figure named by the first argument; without a known name prints the list.

    Returns:
        The exit code: that of the figure (1: a bound is missed), or 2 for an unknown name.
    """
    known = figures(package)
    if not arguments or arguments[0] not in known:
        width = max(map(len, known), default=0)
        print(
            f"python -m {package.__name__} NAME ...",
            *(f"  {name:{width}}  {known[name]}" for name in known),
            sep="\n",
        )
        return 0 if arguments[:1] in ([], ["--help"], ["-h"]) else 2
    return int(importlib.import_module(f"{package.__name__}.{arguments[0]}").main(list(arguments[1:])))


def command_line(command: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of ``python -m COMMAND``, whose help has the lines of ``description`` as they are."""
    return argparse.ArgumentParser(
        prog=f"python -m {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
