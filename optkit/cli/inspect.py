"""``optkit inspect``: the content of an artifact, and the reasons of the decisions.

All output comes from the artifact's own files, after a check of the hashes. Text from files is printed with control
characters escaped (``printable``), never as terminal commands or markup.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from optkit.cli import console
from optkit.cli.tables import print_table
from optkit.errors import UserError, printable
from optkit.json_names import JSON_NAMES

if TYPE_CHECKING:
    from optkit.artifact.open import Artifact
    from optkit.pipeline.choice_here import PlaceChoice
    from optkit.pipeline.records import PassRecord, RunRecord
    from optkit.recipe.schema import Accept, PassEntry, Recipe


def inspect(
    artifact: Annotated[Path, typer.Argument(help="Artifact directory.")],
    graph: Annotated[
        bool, typer.Option("--graph", help="List the ops of the graph, an op per line.")
    ] = False,
    tokens: Annotated[
        int,
        typer.Option(
            "--tokens", help="Prompt length in tokens for the shapes of --graph.", min=1, max=1 << 20
        ),
    ] = 512,
    here: Annotated[
        bool,
        typer.Option(
            "--here",
            help="Predict which candidates of the recipe optkit optimize would choose on this machine; takes seconds.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")] = False,
) -> None:
    """Show an artifact's passes, decisions, bounds and files; with --graph its ops and kernels.

    With --graph each line is an op with its arguments, the shape of the result for a prompt of --tokens tokens, and
    in <> the kernel for the op on the machine at hand. Ops without <> run in plain torch.

    Example: optkit inspect artifact/ --graph | grep linear
    """
    from optkit.artifact.open import Artifact

    opened = Artifact.open(artifact)
    run = load_run(opened)
    if here:
        show_choice(opened, as_json)
        return
    lines = list(graph_lines(opened, tokens)) if graph else None
    if as_json:
        console.print_json(facts(opened, run) | ({"graph": lines} if lines is not None else {}))
    elif lines is not None:
        for line in lines:
            show(line)
    else:
        show_artifact(opened, run)


# -- the content -------------------------------------------------------------------------------


def load_run(artifact: Artifact) -> RunRecord:
    """The records of report.json.

    Raises:
        UserError: the file is missing or not a report.
    """
    from optkit.pipeline.records import RunRecord
    from optkit.pipeline.report_file import read_report

    return RunRecord.from_dict(read_report(artifact.directory))


def facts(artifact: Artifact, run: RunRecord) -> dict[str, Any]:
    """All output of ``inspect`` besides the graph, as plain data."""
    keys = ("name", "source", "digest", "recipe", "environment", "files")
    known = {key: artifact.manifest[key] for key in keys if key in artifact.manifest}
    more = {
        "bounds": list(bounds(artifact, run)),
        "code": code_line(artifact),
        "states": state_facts(artifact),
        "baked": baked_facts(artifact),
        JSON_NAMES["variants"]: variant_names(run),
    }
    return known | run.to_dict() | more


def state_facts(artifact: Artifact) -> dict[str, Any]:
    """``state_memory`` of the artifact's graph and recipe."""
    from optkit.runtime.state_memory import state_memory

    return state_memory(artifact.meta(), artifact.recipe)


def baked_facts(artifact: Artifact) -> dict[str, Any]:
    """Tokens of each baked prompt, and the bytes of their KV; empty without."""
    from optkit.artifact.prefix import BLOCKS_FILE, has_prefix, read_facts

    if not has_prefix(artifact.directory):
        return {}
    prompts = {prompt.name: prompt.tokens for prompt in read_facts(artifact.directory).prompts}
    return {"prompts": prompts, "bytes": artifact.manifest["files"][BLOCKS_FILE]["bytes"]}


def baked_lines(artifact: Artifact) -> Iterator[str]:
    """A sentence on ``baked_facts``."""
    if found := baked_facts(artifact):
        prompts = ", ".join(f"{name} ({tokens} tokens)" for name, tokens in found["prompts"].items())
        yield f"baked prompts: {prompts}; {found['bytes']:,} bytes of KV"


def state_lines(artifact: Artifact) -> Iterator[str]:
    """Sentences on ``state_memory``; none for a model without states."""
    found = state_facts(artifact)
    kept = [
        f"{found[key]:,} bytes of {what}"
        for key, what in (("token_bytes", "KV a token"), ("sequence_bytes", "recurrent states a sequence"))
        if found[key]
    ]
    if kept:
        yield f"states  {', '.join(kept)}"
    held = [f"{found['kv_tokens']:,} tokens of KV"] if found.get("kv_tokens") else []
    if found.get("state_slots"):
        held += [
            f"the recurrent states of {found['state_slots']} requests and {found['state_checkpoints']} checkpoints"
        ]
    if "refusal" in found:
        yield f"states  {found['refusal']}"
    if held:
        yield f"states  kv_cache_bytes of the recipe holds {', '.join(held)}"


def variant_names(run: RunRecord) -> list[str]:
    """Names of the layers' variants, few tokens first; empty for layers with a single variant."""
    return list(run.whole.variants) if run.whole else []


def code_line(artifact: Artifact) -> str:
    """A line about the compiled code of the artifact, and whether ``optkit serve`` would run the code."""
    from optkit.lowering.compiled.code_cache import CodeTier

    tier = CodeTier.read(artifact.native)
    if tier is None:
        return "code    none: the artifact is data only"
    origin = "here, by you" if tier.is_ours else "elsewhere: runs only with --trust-artifact-code"
    return f"code    {len(tier.record.variants)} compiled variants, built {origin}"


def bounds(artifact: Artifact, run: RunRecord) -> Iterator[dict[str, Any]]:
    """Each bound of the recipe beside the measured value: bounds of the passes, then of the whole."""
    for record in run.passes:
        if entry := entry_of(artifact.recipe, record):
            yield from compared(record.name, entry.accept, record)
    if run.whole:
        yield from compared("whole", artifact.recipe.accept, run.whole)


def entry_of(recipe: Recipe, record: PassRecord) -> PassEntry | None:
    """The entry of ``recipe`` for a pass: of several with the pass's name, the entry whose options it has."""
    named = [entry for entry in recipe.entries if entry.name == record.name]
    fitting = [e for e in named if all(record.config.get(key) == value for key, value in e.config.items())]
    return max(fitting or named, key=lambda entry: len(entry.config), default=None)


def compared(scope: str, accept: Accept, record: PassRecord) -> Iterator[dict[str, Any]]:
    """The bounds set in ``accept``; ``measured`` is None for a number that was not measured."""
    from optkit.pipeline.decision import Evidence

    evidence = Evidence.of(record) if record.measured else None
    for bound, limit in accept.model_dump(exclude_none=True).items():
        measured = getattr(evidence, bound.removeprefix("max_").removeprefix("min_"), nan)
        yield {"of": scope, "bound": bound, "limit": limit, "measured": None if isnan(measured) else measured}


def graph_lines(artifact: Artifact, tokens: int) -> Iterator[str]:
    """The listing of graph.json with the kernels for the machine at hand.

    Raises:
        UserError: the graph needs a kernel that the machine does not have.
    """
    from optkit.graph.listing import list_graph
    from optkit.graph.shapes import Point
    from optkit.lowering.lower import lower
    from optkit.machine.target import get_target

    graph = artifact.graph()
    try:
        kernels = lower(
            graph, get_target(artifact.recipe.target), device="cpu"
        ).kernels  # works without a GPU
    except LookupError as error:
        raise UserError(
            f"the graph can't run on this machine: {error}", where=str(artifact.directory)
        ) from error
    return list_graph(graph, Point(tokens, 1, tokens), kernels)


# -- printing ------------------------------------------------------------------------------------------


def show_artifact(artifact: Artifact, run: RunRecord) -> None:
    """Print all tables and lines of ``optkit inspect``."""
    from optkit.pipeline.expert_coverage import summary
    from optkit.pipeline.explain import disturbed_sentence, misses_sentence
    from optkit.pipeline.report import (
        alternatives_table,
        compiled_table,
        compiled_variants,
        records_of,
        run_table,
    )

    recipe, manifest = artifact.recipe, artifact.manifest
    versions = ", ".join(f"{key} {value}" for key, value in manifest.get("environment", {}).items())
    show(f"{artifact.name} by {recipe.name}, for {recipe.target}")
    show(f"source  sha256 {manifest.get('source', {}).get('digest', 'unknown')}")
    for note in run.notes:
        show(f"source  {note}")
    show(f"digest  sha256 {manifest.get('digest', 'none: made by an older optkit')}, without measurements")
    show(f"made by {versions}")
    show_table(run_table(run))
    for label, records in run.alternatives.items():
        show_table(alternatives_table(label, records))
    show_table(compiled_table(compiled_variants(run)))
    show(code_line(artifact))
    for line in (*state_lines(artifact), *baked_lines(artifact)):
        show(line)
    if names := variant_names(run):
        show(f"variants {', '.join(names)} in a step: answers depend on the number of tokens in a step")
    for line in reasons(run):
        show(line)
    for record in records_of(run):
        if line := summary(record.stats):
            show(f"{record.name}: {line}")
    for sentence in (misses_sentence, disturbed_sentence):
        if line := sentence(records_of(run)):
            show(line)
    show_table(bounds_table(list(bounds(artifact, run))))
    show_table(files_table(manifest["files"]))


def show_choice(artifact: Artifact, as_json: bool) -> None:
    """Print the predicted choice on this machine: a table for each place of the recipe, and a sentence.

    Raises:
        UserError: the artifact is for a GPU, or its candidates are damaged.
    """
    from dataclasses import asdict

    from optkit.artifact.manifest import CANDIDATES
    from optkit.pipeline.choice_here import predict_here

    if not (artifact.directory / CANDIDATES).is_file():
        raise UserError(
            "there are no candidates to choose from: the recipe's objective decided on no pass",
            where=str(artifact.directory),
            fix="one_of, quantizers and kv_int8 of CPU recipes are candidates, without keep: always, within bounds",
        )
    with console.spinner("measuring layers of the candidates"):
        choices, text = predict_here(artifact.directory)
    if as_json:
        console.print_json({"choices": [asdict(choice) for choice in choices], "sentence": text})
        return
    for choice in choices:
        show_table(choice_table(choice))
    show(text)


def choice_table(choice: PlaceChoice) -> Table:
    """The predicted costs of each candidate, over those of the kept ones: below 1 is better."""
    table = Table(f"{choice.label}: candidates", "objective", "decode", "", box=None, pad_edge=False)
    kept, decode = choice.kept
    for name, forecast in choice.forecasts.items():
        roles = zip(("kept for prompts", "kept for decode", "best for prompts", "best for decode"),
                    (*choice.kept, *choice.best), strict=True)  # fmt: skip
        cost = forecast.cost / choice.forecasts[kept].cost
        step = forecast.decode / choice.forecasts[decode].decode
        table.add_row(
            printable(name or "none"),
            f"{cost:.2f}x",
            f"{step:.2f}x",
            ", ".join(role for role, of in roles if of == name),
        )
    return table


def reasons(run: RunRecord) -> Iterator[str]:
    """The reason of each pass's decision, and the sites left unchanged."""
    for record in run.passes:
        yield f"{record.name}: {record.decision}, {record.reason}"
        for skip in record.skips:
            yield f"    skips {skip['count']}: {skip['reason']} (first: {skip['first']})"


def bounds_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("bound", "limit", "measured", box=None, pad_edge=False)
    for row in rows:
        measured = "not measured" if row["measured"] is None else f"{row['measured']:.6g}"
        table.add_row(f"{row['of']} {row['bound']}", f"{row['limit']:.6g}", measured)
    return table


def files_table(files: dict[str, Any]) -> Table:
    table = Table("file", "bytes", "sha256", box=None, pad_edge=False)
    for name, entry in files.items():
        table.add_row(printable(name), f"{entry['bytes']:,}", entry["sha256"][:16])
    total = sum(entry["bytes"] for entry in files.values())
    table.add_row("all", f"{total:,}", "")
    return table


def show_table(table: Table) -> None:
    if table.row_count:
        console.stdout.print()
        print_table(table)


def show(line: str) -> None:
    console.stdout.print(printable(line))
