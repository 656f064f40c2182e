"""Hashes of the code with an effect on pipeline steps: optkit's files, and the files of plug-in passes.

An edit of a file changes the keys: no step made by older code is taken from the cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from optkit.graph.ops.plugins import registered

PACKAGES = ("optkit", "optkit.passes", "optkit.kernels")  # in a checkout these are three folders
LEFT_OUT = (
    "optkit.api",  # the pipeline imports nothing of the first two, which a test checks
    "optkit.cli",
    "optkit.recipes",  # the content of a recipe is in the keys themselves
)
NO_SOURCE = "__pycache__"


@cache
def compiler_digest() -> str:
    """A hash of every file of optkit but ``LEFT_OUT``: modules, kernels, built libraries, texts and tables."""
    return digest(compiler_files())


def compiler_files() -> dict[Path, str]:
    """The files behind ``compiler_digest`` and their names."""
    left_out = [location for package in LEFT_OUT for location in locations(package)]
    return {
        file: f"{package}/{name}"
        for package in PACKAGES
        for file, name in sources(package)
        if not any(file.is_relative_to(location) for location in left_out)
    }


def plugin_digest(pass_class: type[Any]) -> str | None:
    """A hash of the packages outside of optkit with the code of a pass and of base classes; None for optkit's own."""
    modules = {base.__module__.partition(".")[0] for base in pass_class.__mro__}
    outside = modules - {"optkit"} - sys.stdlib_module_names
    return package_digest(tuple(sorted(outside))) if outside else None


def ops_digests() -> dict[str, list[str]]:
    """Package, version and a hash of the top-level package of each registered plug-in of ops, by namespace."""
    return {
        name: [plugin.package, plugin.version, package_digest((plugin.module.partition(".")[0],))]
        for name, plugin in sorted(registered.items())
    }


@cache
def package_digest(packages: tuple[str, ...]) -> str:
    """A hash of all files of ``packages``, read once a process as their modules are."""
    return digest({file: f"{package}/{name}" for package in packages for file, name in sources(package)})


def digest(files: dict[Path, str]) -> str:
    """A hash of the names and contents of ``files``."""
    total = hashlib.sha256()
    for file, name in sorted(files.items(), key=lambda item: item[1]):
        total.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def sources(package: str) -> Iterator[tuple[Path, str]]:
    """The files of a package or module, with names relative to the package."""
    for location in locations(package):
        if location.is_file():
            yield location, location.name
        for file in location.rglob("*"):
            name = file.relative_to(location)
            if file.is_file() and not any(part == NO_SOURCE or part.startswith(".") for part in name.parts):
                yield file, name.as_posix()


@cache
def locations(package: str) -> tuple[Path, ...]:
    """The folders of a package, or the file of a module; only parent packages are imported."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return ()
    places = spec.submodule_search_locations or [spec.origin or ""]
    return tuple(Path(place).resolve() for place in places)
