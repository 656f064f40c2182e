"""``optkit tune``: from an objective to the recipe and the serve options that hold it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from optkit.api.tune import BUDGET
from optkit.api.tune import tune as search
from optkit.cli import console


def tune(
    model: Annotated[
        str,
        typer.Argument(
            help="Model: a local Hugging Face directory, a .gguf file, a Hub id, or smollm2-135m."
        ),
    ],
    slo: Annotated[
        str,
        typer.Option(
            help="Objective: ttft_p95<700ms@4rps, ttft:700,tpot:50, or 95%:ttft<700ms,tpot<50ms@8clients. Metrics: "
            "ttft, tpot, itl, e2e with p50, p95, p99 or mean; output_throughput, request_throughput. @4rps is "
            "arrivals at random, @8clients clients without pauses. Default load: one client."
        ),
    ],
    budget: Annotated[
        str, typer.Option(help="Time for everything, as in 30m, 2h or 900s; builds count.")
    ] = BUDGET,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Directory for recipe, artifact, log and journal."),
    ] = Path("tuned"),
    recipes: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe",
            "-r",
            help="Recipe to choose from, by name or file; may be repeated, and the first is the default that others "
            "must beat. Default: the recipes that come for CPUs.",
        ),
    ] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 512,
    output_len: Annotated[int, typer.Option(help="Output tokens of each request.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Seed of all prompts and arrivals.", min=0)] = 0,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Start over where the directory has a journal, and overwrite files of another origin.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")] = False,
) -> None:
    """Find the recipe and the serve options that hold an objective, with the evidence.

    Builds the recipes whose quality stays inside its bound, calibrates each in less than a minute, simulates hundreds
    of settings with the real scheduler on a virtual clock, races the best few against the default on this machine,
    and confirms the winner on fresh prompts in three orders of arrival. A setting differs from the default only where
    that was measured to help.

    Writes recipe.yaml with the evidence as comments, artifact/ ready for optkit serve, report.md and trials.json. A
    killed run resumes with the same command. The machine should do nothing else meanwhile.

    Exit codes: 0 the objective is held, 2 wrong usage, 3 it is not: the last lines then say what is reachable, what
    binds, and which single change would help most.

    Example: optkit tune smollm2-135m --slo "ttft_p95<700ms@4rps" --budget 30m -o tuned/
    """
    try:
        with console.spinner("preparing") as progress:
            report = search(
                model,
                slo,
                out,
                budget=budget,
                recipes=recipes or (),
                input_len=input_len,
                output_len=output_len,
                seed=seed,
                force=force,
                progress=lambda event: (
                    console.warn(event.text) if event.kind == "warning" else progress(event.text)
                ),
            )
    except KeyboardInterrupt:
        console.stderr.print(f"finished trials are in {out}: the same command resumes")
        raise
    if as_json:
        console.print_json(asdict(report))
    else:
        style = "green" if report.held else "bold red"
        for number, line in enumerate(report.lines):
            console.stdout.print(line, style=style if number == 1 else "")
        for file in report.files:
            console.stdout.print(f"wrote {file}", style="dim")
    if report.exit_code:
        raise typer.Exit(report.exit_code)
