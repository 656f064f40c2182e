"""``optkit rebuild``: compile an artifact's planned layers on the machine at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optkit.cli import console
from optkit.cli.tables import print_table


def rebuild(
    artifact: Annotated[Path, typer.Argument(help="Artifact directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")] = False,
) -> None:
    """Compile an artifact's layers on this machine, for code that was built on another machine.

    Serving never compiles, and runs only compiled code built on the same machine by the same user. This command
    builds the code from the artifact's graph into the private cache, times every variant against the uncompiled path,
    and keeps the faster variants. The artifact is not changed. Needs a C++ compiler.

    Example: optkit rebuild artifact/ && optkit serve artifact/
    """
    from optkit.artifact.open import Artifact
    from optkit.errors import UserError
    from optkit.lowering.compiled.plan import PLAN
    from optkit.machine.target import get_target
    from optkit.passes.compile import has_compiler
    from optkit.pipeline.aot_compile import rebuild as build
    from optkit.pipeline.report import compiled_table

    opened = Artifact.open(artifact)
    graph = opened.graph()
    if PLAN not in graph.annotations:
        raise UserError(
            "the artifact has no compiled layers",
            where=str(artifact),
            fix="only recipes with the pass 'compile' have compiled layers",
        )
    if not has_compiler():
        raise UserError("no C++ compiler found", where="PATH", fix="install g++ or clang++, or set CXX")
    with console.spinner("compiling") as progress:
        built = build(graph, opened.recipe, get_target(opened.recipe.target), progress)
    if as_json:
        console.print_json({"artifact": str(artifact), "compiled": built.rows})
        return
    print_table(compiled_table(built.rows))
