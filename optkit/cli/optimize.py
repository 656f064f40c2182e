"""``optkit optimize``: compile a model by a recipe into an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optkit.api.optimize import OptimizeResult, warn_without_native_kernels, with_overrides
from optkit.api.optimize import optimize as compile_model
from optkit.api.progress import ProgressEvent
from optkit.cli import console
from optkit.cli.tables import print_table
from optkit.evaluation.limits import FINAL_TOKENS, LEAST_FINAL_TOKENS

if TYPE_CHECKING:
    from optkit.recipe.schema import Recipe

BOUND_MISSED = 3  # exit code
FIXED_STAGES = 4  # locating the model, capture, the whole, writing


def optimize(
    model: Annotated[
        str,
        typer.Argument(
            help="Model: a local Hugging Face directory, a .gguf file, a Hub id, or smollm2-135m."
        ),
    ],
    recipe: Annotated[
        str,
        typer.Option("--recipe", "-r", help="Name of a shipped recipe (optkit recipe list), or a YAML file."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Artifact directory to write. Default: RECIPE-artifact."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Override a recipe value, as in passes.int8.lm_head=false. May be repeated."
        ),
    ] = None,
    adapters: Annotated[
        list[Path] | None,
        typer.Option(
            "--adapter", help="Directory of a LoRA adapter (PEFT) to merge into the model. May be repeated."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing artifact in the output directory.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print plan and predictions only; loads no weights and writes nothing."
        ),
    ] = False,
    quality_tokens: Annotated[
        int | None,
        typer.Option(
            help="Held-out tokens for the quality of the whole result, all of them. "
            f"Default: up to {FINAL_TOKENS}, fewer once a bound is certain to be met or missed.",
            min=LEAST_FINAL_TOKENS,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")] = False,
) -> None:
    """Compile a model by a recipe, measure every step, and write an artifact.

    Each pass of the recipe is checked, applied, verified, predicted and measured through the runtime. A pass is kept
    only within the recipe's bounds. An interrupted run resumes: the cache keeps finished steps.
    Before anything starts, an estimate of time, memory and disk is printed, and a run that cannot fit is refused.

    Exit code 3: the artifact is written, but misses a bound of the recipe, and undoing more passes cannot help.

    Example: optkit optimize smollm2-135m --recipe ttft-cpu -o artifact/
    """
    loaded = with_overrides(recipe, overrides or [])
    if dry_run:
        warn_without_native_kernels(loaded, show_warning)
        _dry_run(model, loaded, adapters or [], as_json)
        return
    with console.stages(len(loaded.entries) + FIXED_STAGES) as progress:

        def show(event: ProgressEvent) -> None:
            if event.kind == "warning":
                show_warning(event)
            else:
                progress(event.text, part=event.part)

        result = compile_model(
            model,
            loaded,
            out,
            adapters=adapters or [],
            force=force,
            quality_tokens=quality_tokens,
            progress=show,
        )
    if as_json:
        _print_json(result)
    else:
        _print_text(result)
    if result.run.missed_bounds:
        raise typer.Exit(BOUND_MISSED)


def _print_json(result: OptimizeResult) -> None:
    from optkit.pipeline.explain import misses
    from optkit.pipeline.report import records_of

    missed = {"missed_predictions": misses(records_of(result.run))}
    console.print_json({"artifact": str(result.artifact), **result.run.to_dict(), **missed})


def _print_text(result: OptimizeResult) -> None:
    from optkit.pipeline.report import (
        alternatives_table,
        compiled_table,
        compiled_variants,
        run_table,
    )

    run = result.run
    print_table(run_table(run))
    for label, records in run.alternatives.items():
        print_table(alternatives_table(label, records))
    if compiled_variants(run):
        print_table(compiled_table(compiled_variants(run)))
    for line in result.summary():
        console.stdout.print(line)
    console.stdout.print(f"wrote {result.artifact}\nnext: optkit serve {result.artifact}")


def show_warning(event: ProgressEvent) -> None:
    console.warn(event.text)


def _dry_run(model: str, recipe: Recipe, adapters: list[Path], as_json: bool) -> None:
    from optkit.pipeline.dry_run import dry_run

    with console.spinner("planning") as progress:
        plan = dry_run(model, recipe, progress, adapters)
    if as_json:
        console.print_json(plan)
        return
    for note in plan["notes"]:
        console.stdout.print(f"source: {note}")
    if plan.get("estimate"):
        console.stdout.print(plan["estimate"]["line"])
        if plan["estimate"].get("refusal"):
            console.stdout.print(f"the run would be refused: {plan['estimate']['refusal']}", markup=False)
    for entry in plan["passes"]:
        console.stdout.print(_plan_line(entry))
        for skip in entry["skips"]:
            console.stdout.print(
                f"    skips {skip['count']}x: {skip['reason']} (first: {skip['first']})", style="dim"
            )
    if plan["baseline"]:
        print_table(_prediction_table(plan))
    if plan.get("unpredicted"):
        points = ", ".join(plan["unpredicted"])
        console.stdout.print(f"no prediction for {points}: the model is too large to measure on this machine")
    console.stdout.print(f"target {plan['target']['name']}, ceilings {plan['target']['source']}", style="dim")


def _plan_line(entry: dict[str, Any]) -> str:
    return f"{entry['name']}: {len(entry['sites'])} sites"


def _prediction_table(plan: dict[str, Any]) -> Any:
    """Predicted milliseconds of each step, after each pass."""
    from rich.table import Table

    labels = list(plan["baseline"])
    grid = Table("", *labels, title="predicted, ms", title_justify="left")
    grid.add_row("as captured", *(f"{plan['baseline'][label] * 1e3:.2f}" for label in labels))
    for entry in plan["passes"]:
        times = entry["predicted"]
        cells = (f"{times[label][1] * 1e3:.2f}" if label in times else "no prediction" for label in labels)
        grid.add_row(f"+ {entry['name']}", *cells)
    return grid
