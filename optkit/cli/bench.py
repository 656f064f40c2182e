"""``optkit bench``: measure latency and throughput over HTTP, against baselines, with an exit code for a missed SLO."""

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
    from optkit.bench.metrics import LatencyBounds
    from optkit.bench.result import BenchResult
    from optkit.bench.run import Progress, Side

SLO_MISSED, OBJECTIVE_WORSE = 3, 4
RECIPE = "recipe"  # value of --slo: the bounds of the artifact's recipe


def _bounds_help(option: str) -> str:
    return f"Bounds in milliseconds on ttft, tpot and e2e, as in {option} ttft:700,tpot:50."


def bench(
    artifact: Annotated[
        Path | None, typer.Argument(help="Artifact directory to serve and measure; or give --url.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Measure a running server, as in http://127.0.0.1:8000. OPTKIT_API_KEY holds the API key, if any."
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Model to compare with, as in smollm2-135m: unoptimized on optkit's runtime, and in transformers."
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests of each side in each round.")] = 16,
    input_len: Annotated[
        int, typer.Option("--input-len", "--random-input-len", help="Tokens of each prompt.")
    ] = 512,
    output_len: Annotated[
        int,
        typer.Option(
            "--output-len",
            "--random-output-len",
            help="Output tokens of each request; no request stops early.",
        ),
    ] = 64,
    max_concurrency: Annotated[
        int | None,
        typer.Option(help="Most requests in flight. Default: 1 without --request-rate, else no limit."),
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second, arriving at random (Poisson), as in 2.5. Default: clients without pauses."
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(
            help="Rounds; the sides take turns in each. The table shows medians over rounds.", min=1
        ),
    ] = 3,
    num_warmups: Annotated[
        int, typer.Option(help="Unmeasured requests of each side before the first round.", min=0)
    ] = 2,
    goodput: Annotated[
        str | None,
        typer.Option(help=_bounds_help("--goodput") + " Shows the requests per second within all bounds."),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            help=_bounds_help("--slo")
            + " --slo recipe takes the bounds of the artifact's recipe. Exit code 3 if the p95 misses a bound."
        ),
    ] = None,
    definitions: Annotated[
        str, typer.Option(help="Formulas of the metrics: optkit, vllm, aiperf, guidellm or llmperf.")
    ] = "optkit",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Model with the tokenizer for the prompts. Default: the artifact, else --baseline."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of prompts and arrivals: the same seed gives the same requests.")
    ] = 0,
    save_result: Annotated[
        Path | None, typer.Option(help="JSON file to write: every timestamp, and the summaries.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")] = False,
) -> None:
    """Measure latency and throughput over HTTP, and compare with the unoptimized model.

    All sides get identical prompts at identical arrivals, in interleaved rounds, so drift of the machine cancels in a
    ratio. A prompt has exactly --input-len tokens of real text and shares no prefix with another prompt, so no prefix
    cache can help. The output shows the formula of each metric, since benchmark tools use the same name for different
    metrics.

    TTFT (time to first token) depends on prompt length and load: state both with every number.

    With an artifact and --baseline, the last lines say whether the artifact is faster than each side by its recipe's
    objective; nothing is said of the objective memory.

    Exit codes: 0 done, 2 wrong usage or no server, 3 the p95 of the first side misses a bound of --slo, 4 the artifact
    is slower than one of the sides, by the objective of its recipe and in every round.

    Example: optkit bench artifact/ --baseline smollm2-135m --slo ttft:700
    """
    need_extra("serve", "optkit bench")
    from optkit.bench.metrics import DEFINITIONS
    from optkit.bench.run import run_bench
    from optkit.bench.workload import WorkloadConfig

    if definitions not in DEFINITIONS:
        raise UserError("unknown --definitions", where=definitions, fix=nearest(definitions, DEFINITIONS))
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
    worse = baseline is not None and _worse_than_baseline(result, artifact)
    if slo and result.slo_misses():
        raise typer.Exit(SLO_MISSED)
    if worse:
        raise typer.Exit(OBJECTIVE_WORSE)


def parse_bounds(text: str) -> LatencyBounds:
    """Parse ``ttft:700,tpot:50`` (milliseconds; commas or spaces) to LatencyBounds."""
    from optkit.bench.metrics import LatencyBounds

    values: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        name, _, number = part.partition(":")
        if name not in LatencyBounds.__dataclass_fields__:
            raise UserError(
                f"unknown metric: {name}", where=text, fix=nearest(name, LatencyBounds.__dataclass_fields__)
            )
        values[name] = _milliseconds(number, text)
    return LatencyBounds(**values)


def recipe_bounds(artifact: Path | None) -> LatencyBounds:
    """The ``slo`` section of an artifact's recipe as bounds.

    Raises:
        UserError: there is no artifact, or the recipe has no SLO.
    """
    from optkit.artifact.open import Artifact
    from optkit.bench.metrics import LatencyBounds

    if artifact is None:
        raise UserError("no recipe without an artifact", where="--slo recipe", fix="write --slo ttft:700")
    slo = Artifact.open(artifact).recipe.slo
    bounds = LatencyBounds(ttft=slo.ttft_ms, tpot=slo.tpot_ms)
    if not bounds.bounds():
        raise UserError("the artifact's recipe has no slo", where="--slo recipe", fix="write --slo ttft:700")
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
        raise UserError(
            "needs either an artifact or --url", where="optkit bench", fix="optkit bench artifact/"
        )
    if artifact is not None and not artifact.is_dir():
        raise UserError("no such artifact", where=str(artifact), fix="optkit optimize MODEL -o DIR makes one")
    first = (
        Side("server", url=url, api_key=os.environ.get(API_KEY))
        if artifact is None
        else artifact_side(artifact)
    )
    return [first, *(baseline_sides(baseline, progress) if baseline else [])]


def _tokenizer_dir(tokenizer: str | None, artifact: Path | None, baseline: str | None) -> str:
    """Directory of the tokenizer: --tokenizer, else the artifact, else the baseline model."""
    from optkit.checkpoint.locate import resolve

    if tokenizer is None and artifact is not None:
        return str(artifact)
    model = tokenizer or baseline
    if model is None:
        raise UserError(
            "prompts need a tokenizer", where="--url", fix="add --tokenizer MODEL or --baseline MODEL"
        )
    return str(resolve(model).directory)


def _worse_than_baseline(result: BenchResult, artifact: Path | None) -> bool:
    """Print the verdict of each side; True where the artifact is worse than a side. False without an artifact."""
    if artifact is None:
        return False
    from optkit.artifact.open import Artifact
    from optkit.bench.verdict import verdicts

    objective = Artifact.open(artifact, verify=False).recipe.objective  # the server has checked the hashes
    found = verdicts(result, objective)
    for verdict in found:
        style = "bold red" if verdict.worse else "green" if verdict.faster else "yellow"
        console.stderr.print(verdict.line(), style=style)
    return any(verdict.worse for verdict in found)


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
