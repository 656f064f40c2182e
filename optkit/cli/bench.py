"""``optkit bench``: time to first token and the rest, over HTTP, against a baseline, with an exit code per SLO."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optkit.cli import console
from optkit.cli.tables import print_table
from optkit.errors import UserError, nearest
from optkit.extras import need_extra

if TYPE_CHECKING:
    from optkit.bench.metrics import Slo
    from optkit.bench.result import BenchResult
    from optkit.bench.run import Progress, Side

SLO_MISSED = 3
RECIPE = "recipe"  # of --slo: the promise of the artifact's recipe


def _bounds_help(option: str) -> str:
    return f"Bounds in ms: {option} ttft:700,tpot:50 (also e2e)."


def bench(
    artifact: Annotated[Path | None, typer.Argument(help="Artifact to serve and measure.")] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Measure a server that already runs, http://host:port. Its key: OPTKIT_API_KEY."),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="Model to compare with: unoptimized on this runtime, and in plain transformers."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests a round.")] = 16,
    input_len: Annotated[
        int, typer.Option("--input-len", "--random-input-len", help="Prompt tokens, exactly.")
    ] = 512,
    output_len: Annotated[
        int, typer.Option("--output-len", "--random-output-len", help="Output tokens, exactly.")
    ] = 64,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Requests in flight; 1 if there is no rate, else unbounded.")
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Poisson arrivals a second; without it clients never pause.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; medians are over rounds.", min=1)] = 3,
    num_warmups: Annotated[int, typer.Option(help="Requests a side before the first round.", min=0)] = 2,
    goodput: Annotated[str | None, typer.Option(help=_bounds_help("--goodput"))] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            help=_bounds_help("--slo")
            + " Or: --slo recipe, the artifact's own. Exit code 3 if the p95 misses one."
        ),
    ] = None,
    definitions: Annotated[
        str, typer.Option(help="Whose formulas: optkit, vllm, aiperf, guidellm or llmperf.")
    ] = "optkit",
    tokenizer: Annotated[
        str | None, typer.Option(help="Model whose tokenizer cuts the prompts; needed with --url alone.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Prompts and arrivals follow from it.")] = 0,
    save_result: Annotated[
        Path | None, typer.Option(help="Write every timestamp and summary as JSON.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure latency and throughput over HTTP, and compare with the unoptimized model.

    All sides get identical prompts at identical arrivals, in interleaved
    rounds, so that a ratio is not the machine's mood. A prompt has exactly
    --input-len tokens of real text and shares no prefix with another, so no
    cache can help. Formulas are printed with the numbers, since tools use one
    name for different metrics.

    TTFT depends on prompt length and load: state both with every number.

    Example: optkit bench artifact/ --baseline smollm2-135m --slo ttft:700
    """
    need_extra("serve", "optkit bench")
    from optkit.bench.metrics import DEFINITIONS
    from optkit.bench.run import run_bench
    from optkit.bench.workload import WorkloadConfig

    if definitions not in DEFINITIONS:
        raise UserError("unknown definitions", where=definitions, fix=nearest(definitions, DEFINITIONS))
    if slo and goodput:
        raise UserError(
            "--slo and --goodput both set the bounds", where="optkit bench", fix="give one of them"
        )
    bounds = recipe_bounds(artifact) if slo == RECIPE else parse_bounds(slo or goodput or "")
    if request_rate is None and max_concurrency is None:
        max_concurrency = 1
    config = WorkloadConfig(num_prompts, input_len, output_len, max_concurrency, request_rate, seed)
    config.check()
    with console.spinner("preparing") as progress:
        sides = _sides(artifact, url, baseline, progress)
        directory = _tokenizer_dir(tokenizer, artifact, baseline)
        result = run_bench(sides, config, directory, rounds, num_warmups, bounds, definitions, progress)
    if save_result:
        result.save(save_result)
    _print(result, as_json)
    if slo and result.slo_misses():
        raise typer.Exit(SLO_MISSED)


def parse_bounds(text: str) -> Slo:
    """``ttft:700,tpot:50`` (milliseconds; commas or spaces) as an Slo."""
    from optkit.bench.metrics import Slo

    values: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        name, _, number = part.partition(":")
        if name not in Slo.__dataclass_fields__:
            raise UserError(
                f"no such metric: {name}", where=text, fix=nearest(name, Slo.__dataclass_fields__)
            )
        values[name] = _milliseconds(number, text)
    return Slo(**values)


def recipe_bounds(artifact: Path | None) -> Slo:
    """The promise of an artifact's recipe (``slo``) as bounds.

    Raises:
        UserError: there is no artifact, or its recipe promises nothing.
    """
    from optkit.artifact.artifact import Artifact
    from optkit.bench.metrics import Slo

    if artifact is None:
        raise UserError("a server has no recipe", where="--slo recipe", fix="write --slo ttft:700")
    promised = Artifact.open(artifact).recipe.slo
    bounds = Slo(ttft=promised.ttft_ms, tpot=promised.tpot_ms)
    if not bounds.bounds():
        raise UserError("its recipe promises nothing", where="--slo recipe", fix="write --slo ttft:700")
    return bounds


def _milliseconds(number: str, text: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise UserError(
            f"not a positive number of milliseconds: {number!r}", where=text, fix="write ttft:700"
        )
    return value


def _sides(artifact: Path | None, url: str | None, baseline: str | None, progress: Progress) -> list[Side]:
    from optkit.bench.run import Side, artifact_side, baseline_sides
    from optkit.bench.servers import API_KEY

    if (artifact is None) == (url is None):
        raise UserError("give an ARTIFACT or --url, and not both", where="optkit bench")
    if artifact is not None and not artifact.is_dir():
        raise UserError("no such artifact", where=str(artifact), fix="optkit optimize MODEL -o DIR makes one")
    first = (
        Side("server", url=url, api_key=os.environ.get(API_KEY))
        if artifact is None
        else artifact_side(artifact)
    )
    return [first, *(baseline_sides(baseline, progress) if baseline else [])]


def _tokenizer_dir(tokenizer: str | None, artifact: Path | None, baseline: str | None) -> str:
    """Where the tokenizer is: --tokenizer, the artifact itself, or the baseline model."""
    from optkit.checkpoint.locate import resolve

    if tokenizer is None and artifact is not None:
        return str(artifact)
    model = tokenizer or baseline
    if model is None:
        raise UserError(
            "prompts need a tokenizer", where="--url", fix="add --tokenizer MODEL or --baseline MODEL"
        )
    return str(resolve(model).directory)


def _print(result: BenchResult, as_json: bool) -> None:
    from optkit.bench.table import legend, table

    for line in result.problems()[:10]:
        console.warn(line)
    if as_json:
        console.print_json(result.to_dict())
    else:
        print_table(table(result))
        for line in legend(result):
            console.stdout.print(line, style="dim")
    for line in result.slo_misses():
        console.stderr.print(f"SLO missed: {line}", style="bold red")
