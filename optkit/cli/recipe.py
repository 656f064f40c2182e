"""``optkit recipe``: list, show, check and create recipes."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from optkit.cli import console
from optkit.cli.help import PlainCommand
from optkit.cli.tables import print_table
from optkit.errors import UserError, printable
from optkit.passes.resolve import (
    Alternatives,
    Resolved,
    ResolvedPass,
    recipe_json_schema,
    resolve_passes,
)
from optkit.recipe.load import list_recipes, load_recipe, parse_recipe
from optkit.recipe.schema import SHIPPED, Accept, Recipe, format_bytes

app = typer.Typer(help="List, show, check and create recipes.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(help="Name of a shipped recipe, or a YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a value, as in passes.int8.lm_head=false. May be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]


@app.command("list", cls=PlainCommand)
def list_(as_json: Json = False) -> None:
    """List the recipes shipped with optkit.

    Example: optkit recipe list
    """
    recipes = list_recipes()
    if as_json:
        console.print_json([_summary(recipe) for recipe in recipes])
        return
    print_table(table(recipes))


def table(recipes: list[Recipe]) -> Table:
    """A row per recipe."""
    grid = Table("recipe", "target", "passes", "description", box=None, pad_edge=False)
    for recipe in recipes:
        names = ", ".join(entry.name for entry in recipe.entries) or "(none)"
        grid.add_row(recipe.name, recipe.target, names, printable(recipe.description))
    return grid


def _summary(recipe: Recipe) -> dict[str, Any]:
    passes = [entry.name for entry in recipe.entries]
    return {"name": recipe.name, "target": recipe.target, "description": recipe.description, "passes": passes}


@app.command(cls=PlainCommand)
def show(name: Name, set_: Overrides = None, as_json: Json = False) -> None:
    """Print a recipe with every default written out, merged over the recipe it extends.

    Example: optkit recipe show ttft-cpu > mine.yaml
    """
    recipe = load_recipe(name, set_ or [])
    if as_json:
        console.print_json(recipe.to_data())
    else:
        console.stdout.print(recipe.to_yaml().rstrip())


@app.command(cls=PlainCommand)
def check(name: Name, set_: Overrides = None, as_json: Json = False) -> None:
    """Validate a recipe and print its passes in order.

    The recipe that it extends is merged, and the options of each pass are checked too. Needs no model. Exit code 2
    with file, line and the nearest known key for a mistake.

    Example: optkit recipe check mine.yaml --set runtime.max_num_seqs=4
    """
    recipe = load_recipe(name, set_ or [])
    resolved = resolve_passes(recipe)
    if as_json:
        plans = [_plan(row) for row in resolved]
        console.print_json({"valid": True, "recipe": recipe.to_data(), "passes": plans})
        return
    for line in _plan_lines(recipe, resolved):
        console.stdout.print(line)


def _plan(row: Resolved) -> dict[str, Any]:
    if isinstance(row, Alternatives):
        return {"name": row.name, "one_of": [list(map(_plan, candidate)) for candidate in row.candidates]}
    options = row.config.model_dump(mode="json")
    accept = row.entry.accept.model_dump(mode="json", exclude_none=True)
    return {"name": row.entry.name, "options": options, "accept": accept}


def _plan_lines(recipe: Recipe, resolved: list[Resolved]) -> list[str]:
    work, size = recipe.workload, recipe.runtime
    prompts = ", ".join(map(str, work.prompt_tokens))
    lines = [
        printable(f"{recipe.name} for {recipe.target}: {recipe.description}"),
        *(f"extends   {base}" for base in recipe.document.bases),
        f"workload  prompts of {prompts} tokens, {work.output_tokens} out, batch {work.batch}",
        f"runtime   {size.max_num_seqs} sequences, KV cache {format_bytes(size.kv_cache_bytes)}",
    ]
    if changed := recipe.serving.model_dump(mode="json", exclude_defaults=True):
        lines.append(f"serving   {', '.join(f'{key}={value}' for key, value in changed.items())}")
    if recipe.evaluation.text != SHIPPED:
        lines.append(f"quality   on {recipe.evaluation.text}")
    if recipe.files.float_copies:
        lines.append("files     float copies of layers that compressed-tensors has no format for")
    for number, row in enumerate(resolved, 1):
        if isinstance(row, Alternatives):
            lines.append(f"{number:>3}. {row.name}, one of:")
            for candidate in row.candidates:
                first, *rest = map(_plan_line, candidate)
                lines += [f"   - {first}", *(f"     {line}" for line in rest)]
        else:
            lines.append(f"{number:>3}. {_plan_line(row)}")
    if not resolved:
        lines.append("no passes: the model is captured and served unchanged")
    whole = _bounds(recipe.accept, "whole     ")
    return [*lines, whole] if whole else lines


def _plan_line(row: ResolvedPass) -> str:
    """``int8   group_size=32, ...   keep if max_kld 0.01``"""
    options = ", ".join(f"{key}={value}" for key, value in _plan(row)["options"].items())
    return f"{row.entry.name:<20} {options}{_bounds(row.entry.accept, '   keep if ')}".rstrip()


def _bounds(accept: Accept, prefix: str) -> str:
    bounds = accept.model_dump(exclude_none=True)
    return prefix + ", ".join(f"{key} {value}" for key, value in bounds.items()) if bounds else ""


@app.command(cls=PlainCommand)
def new(
    name: Annotated[str, typer.Argument(help="Name of the recipe; the file is NAME.yaml.")],
    directory: Annotated[Path, typer.Option("--dir", help="Directory of the new file.")] = Path("."),
) -> None:
    """Write a commented starter recipe.

    Example: optkit recipe new mine && optkit recipe check mine.yaml
    """
    text = (importlib.resources.files("optkit.recipes") / "_starter.yaml").read_text(encoding="utf-8")
    text = text.replace("NAME", name)
    parse_recipe(text, f"recipe new {name}")
    path = directory / f"{name}.yaml"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError("the file already exists", where=str(path)) from error
    except OSError as error:
        raise UserError(f"cannot write: {error.strerror}", where=str(path)) from error
    console.stdout.print(f"wrote {path}; next: optkit recipe check {path}")


@app.command(cls=PlainCommand)
def schema() -> None:
    """Print the JSON Schema of a recipe, for editors.

    Example: optkit recipe schema > recipe.schema.json
    """
    console.print_json(recipe_json_schema())
