"""``optkit verify``: is an artifact what its manifest says, and does its graph hold?

First the hashes: every file, whatever is extra, missing, changed or not a plain file. Only when all agree is
anything loaded: the recipe, then graph.json with its weights, which must pass the graph verifier. Compiled code is
compared with its own record and never opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optkit.artifact.manifest import NATIVE
from optkit.cli import console
from optkit.cli.inspect import code_line, show

if TYPE_CHECKING:
    from optkit.artifact.open import Artifact

DIFFERS = 3


def verify(
    artifact: Annotated[Path, typer.Argument(help="Artifact directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Check every hash of an artifact, then that its graph loads and holds.

    Exit codes: 0 all is well, 2 it is not an artifact (or its manifest is
    damaged), 3 something differs; every difference is listed.
    """
    from optkit.artifact.manifest import read_manifest
    from optkit.artifact.open import Artifact

    opened = Artifact(artifact, read_manifest(artifact))
    with console.spinner(f"checking {artifact}"):
        found = list(file_problems(opened)) or list(content_problems(opened))
    count = len(opened.manifest["files"])
    if as_json:
        console.print_json({"artifact": str(artifact), "ok": not found, "files": count, "problems": found})
    good = [f"{artifact}: {count} files and the graph are as they should be", code_line(opened)]
    for line in [] if as_json else found or good:
        show(line)
    if found:
        raise typer.Exit(DIFFERS)


def file_problems(artifact: Artifact) -> Iterator[str]:
    """Differences between the files and the manifest; a file that can't be read is one."""
    from optkit.artifact.manifest import problems

    try:
        yield from problems(artifact.directory, artifact.manifest)
    except OSError as error:
        yield f"{error.filename or artifact.directory} can't be read: {error.strerror}"


def content_problems(artifact: Artifact) -> Iterator[str]:
    """The first reason why the recipe or the graph can't be used."""
    from safetensors import SafetensorError

    from optkit.errors import UserError
    from optkit.graph.verify import VerifyError
    from optkit.graph.verify import verify as verify_graph

    try:
        _ = artifact.recipe
        verify_graph(artifact.graph())
        yield from code_problems(artifact)
    except (UserError, VerifyError, SafetensorError, OSError, ValueError, RecursionError) as error:
        yield str(error)


def code_problems(artifact: Artifact) -> Iterator[str]:
    """Differences between the code tier's files and its record."""
    from optkit.lowering.compiled.code_cache import RECORD, CodeTier

    present = {name for name in artifact.manifest["files"] if name.startswith(f"{NATIVE}/")}
    tier = CodeTier.read(artifact.native)
    if tier is None:
        if present:
            yield f"{NATIVE} has files and no {RECORD} that can be read"
        return
    yield from tier.problems()
    for name in sorted(present - {f"{NATIVE}/{n}" for n in (RECORD, *dict(tier.files()))}):
        yield f"{name} is not in {RECORD}"
