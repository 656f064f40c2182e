"""``optkit bench``: measure latency and throughput over HTTP, against baselines, with an exit code for a missed SLO."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optkit.api.bench import bench as measure
from optkit.cli import console
from optkit.cli.tables import print_table
from optkit.extras import need_extra

if TYPE_CHECKING:
    from optkit.api.bench import BenchReport


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
    with console.spinner("preparing") as progress:
        report = measure(
            artifact,
            url=url,
            baseline=baseline,
            num_prompts=num_prompts,
            input_len=input_len,
            output_len=output_len,
            max_concurrency=max_concurrency,
            request_rate=request_rate,
            rounds=rounds,
            num_warmups=num_warmups,
            slo=slo,
            goodput=goodput,
            definitions=definitions,
            tokenizer=tokenizer,
            seed=seed,
            progress=lambda event: progress(event.text),
        )
    if save_result:
        report.save(save_result)
    _print(report, as_json)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def _print(report: BenchReport, as_json: bool) -> None:
    need_extra("serve", "optkit bench")
    from optkit.bench.table import legend, table

    result = report.result
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
    for verdict in report.verdicts:
        style = "bold red" if verdict.worse else "green" if verdict.faster else "yellow"
        console.stderr.print(verdict.line(), style=style)
