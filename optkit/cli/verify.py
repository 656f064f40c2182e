"""``optkit verify``: compare an artifact with its manifest, and verify its graph.

First the hashes: extra, missing, changed files and files of other kinds. Only with correct hashes are the recipe,
graph.json and the weights loaded, and the graph verifier runs. Compiled code is compared with its record and never
opened.
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")] = False,
) -> None:
    """Check every hash of an artifact, then load and verify its graph.

    Exit codes: 0 no difference, 2 not an artifact or a damaged manifest, 3 at least one difference; all differences
    are listed.

    Example: optkit verify artifact/
    """
    from optkit.artifact.manifest import read_manifest
    from optkit.artifact.open import Artifact

    opened = Artifact(artifact, read_manifest(artifact))
    with console.spinner(f"checking {artifact}"):
        found = list(file_problems(opened)) or list(content_problems(opened))
    count = len(opened.manifest["files"])
    if as_json:
        console.print_json({"artifact": str(artifact), "ok": not found, "files": count, "problems": found})
    good = [f"{artifact}: {count} files and the graph are correct", code_line(opened)]
    for line in [] if as_json else found or good:
        show(line)
    if found:
        raise typer.Exit(DIFFERS)


def file_problems(artifact: Artifact) -> Iterator[str]:
    """Differences between the files and the manifest. An unreadable file is a difference."""
    from optkit.artifact.manifest import problems

    try:
        yield from problems(artifact.directory, artifact.manifest)
    except OSError as error:
        yield f"{error.filename or artifact.directory} can't be read: {error.strerror}"


def content_problems(artifact: Artifact) -> Iterator[str]:
    """The first reason against using the recipe or the graph."""
    from safetensors import SafetensorError

    from optkit.artifact.prefix import has_prefix, read_prefix
    from optkit.errors import UserError
    from optkit.graph.verify import VerifyError
    from optkit.graph.verify import verify as verify_graph

    try:
        _ = artifact.recipe
        graph = artifact.graph()
        verify_graph(graph)
        if has_prefix(artifact.directory):
            read_prefix(artifact.directory, graph.meta.vocab_size)
        yield from code_problems(artifact)
    except (UserError, VerifyError, SafetensorError, OSError, ValueError, RecursionError) as error:
        yield str(error)


def code_problems(artifact: Artifact) -> Iterator[str]:
    """Differences between the compiled code's files and its record."""
    from optkit.lowering.compiled.code_cache import RECORD, CodeTier

    present = {name for name in artifact.manifest["files"] if name.startswith(f"{NATIVE}/")}
    tier = CodeTier.read(artifact.native)
    if tier is None:
        if present:
            yield f"{NATIVE} has files but no readable {RECORD}"
        return
    yield from tier.problems()
    for name in sorted(present - {f"{NATIVE}/{n}" for n in (RECORD, *dict(tier.files()))}):
        yield f"{name} is not in {RECORD}"
