"""Builds of the native kernels for tests: other flags, other sources, kept in ``build/`` until a source is newer."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES, BUILD = ROOT / "kernels" / "ops" / "cpu", ROOT / "build"
COMPILE = "-fPIC -O1 -g -std=c++17 -pthread -ffp-contract=off -fvisibility=hidden -fno-omit-frame-pointer"
LINK = "-shared -Wl,-z,defs"  # a function that is nowhere is an error now, not when it is called


class Missing(Exception):
    """A tool is not installed; the message names the package."""


def need_compiler() -> None:
    """Refuse to go on without g++.

    Raises:
        Missing: there is no g++.
    """
    if shutil.which("g++") is None:
        raise Missing("there is no g++; on Debian or Ubuntu: apt-get install g++")


def library(
    made: Path,
    sources: Sequence[Path],
    flags: Sequence[str],
    inputs: Sequence[Path] = (),
    header: Path | None = None,
) -> Path:
    """``sources`` compiled with ``flags`` into the library ``made``, again if a source or one of ``inputs`` is newer.

    Args:
        header: included before each source, and parsed once for all.

    Raises:
        Missing: there is no g++.
    """
    need_compiler()
    newest = max(file.stat().st_mtime for file in [*sources, *SOURCES.glob("*.h"), *inputs, Path(__file__)])
    if not made.exists() or made.stat().st_mtime < newest:
        build(made, sources, flags, header)
    return made


def build(made: Path, sources: Sequence[Path], flags: Sequence[str], header: Path | None = None) -> None:
    """Compile ``sources`` in parallel and link them. The library appears whole, for other processes too."""
    objects = made.with_name(f"{made.stem}-{os.getpid()}")
    objects.mkdir(parents=True, exist_ok=True)
    first = precompiled(header, objects, flags) if header else []

    def compiled(source: Path) -> str:
        to = str(objects / f"{source.stem}.o")
        subprocess.run(["g++", *COMPILE.split(), *flags, *first, "-c", str(source), "-o", to], check=True)
        return to

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        files = list(pool.map(compiled, sources))
    linked = objects / made.name
    subprocess.run(["g++", *LINK.split(), *flags, *files, "-o", str(linked)], check=True)
    linked.replace(made)
    shutil.rmtree(objects)


def precompiled(header: Path, folder: Path, flags: Sequence[str]) -> list[str]:
    """The options that include ``header``, whose syntax tree goes to ``folder``."""
    named = folder / header.name
    named.write_text(f'#include "{header}"\n')
    command = ["g++", *COMPILE.split(), *flags, "-x", "c++-header", str(named), "-o", f"{named}.gch"]
    subprocess.run(command, check=True)
    return ["-include", str(named)]
