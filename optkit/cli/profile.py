"""``optkit profile``: ops of a prefill and of a decode step against their roofs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optkit.cli import console
from optkit.cli.tables import print_table
from optkit.machine.paths import check_place

if TYPE_CHECKING:
    from rich.table import Table

    from optkit.profiling.report import PhaseReport, Report


MOST_TOKENS = 1 << 20  # of a prompt: more than any model takes


def profile(
    artifact: Annotated[Path, typer.Argument(help="Artifact directory.")],
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=MOST_TOKENS, help="Tokens of the prompt, computed in one step.")
    ] = 512,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the decode step.")] = 512,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences that decode in a step.")] = 1,
    steps: Annotated[
        int, typer.Option(min=1, max=100, help="Steps of each phase; the table shows the one of median time.")
    ] = 3,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Directory for files: the report as JSON, a trace for Perfetto, a profile for speedscope, and a page "
            "with a timeline (HTML, works offline).",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")] = False,
) -> None:
    """Measure each op of a prefill and of a decode step, and compare the time with the op's roof.

    The roof of an op is the larger of two times: arithmetic at the machine's measured peak, and memory traffic at the
    measured bandwidth. Lost time is the time minus the roof; the largest loss comes first. Equal ops of different
    layers share a row. Rows without a roof are the work around the ops, and all rows of a phase add up to the step.

    The engine is the engine of optkit serve, in the same process, with the prefix cache off. A running server records
    real steps: optkit serve --profile-dir.

    Examples: optkit profile artifact/ --prompt-tokens 1024 -o profile/; optkit profile artifact/ --sequences 8
    """
    from optkit.evaluation.profiled import profile as measure

    if output is not None:
        check_place(output / "profile.json")
    with console.spinner("preparing") as progress:
        report = measure(artifact, prompt_tokens, context, steps, sequences, progress)
        files = []
        if output is not None:
            from optkit.profiling.files import write_profile

            progress("writing")
            files = write_profile(report, output)
    if as_json:
        console.print_json(report.to_dict() | {"files": [str(file) for file in files]})
        return
    show(report)
    for file in files:
        console.stdout.print(f"wrote {file}")


def show(report: Report) -> None:
    """Print the table of each phase."""
    from optkit.profiling.table import machine

    console.stdout.print(machine(report))
    for phase in report.phases:
        console.stdout.print("")
        print_table(table(phase))


def table(phase: PhaseReport) -> Table:
    """The rows of a phase."""
    from rich import box
    from rich.table import Table

    from optkit.profiling.table import COLUMNS, cells, summary

    found = Table(title=f"{phase.label}: {summary(phase)}", title_justify="left", box=box.SIMPLE_HEAD)
    for number, name in enumerate(COLUMNS):
        found.add_column(name, justify="left" if number < 2 else "right")
    for row in phase.rows:
        found.add_row(*cells(row, phase))
    return found
