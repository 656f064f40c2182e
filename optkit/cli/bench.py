"""``optkit bench``: measure latency and throughput over HTTP: one load, a sweep, or a search for the highest rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optkit.api import rates
from optkit.api.bench import SLO_MISSED
from optkit.api.bench import bench as measure
from optkit.bench.traces import scale_of
from optkit.cli import console
from optkit.cli.bench_output import print_rates, print_report
from optkit.errors import UserError
from optkit.extras import need_extra
from optkit.machine.paths import check_place

if TYPE_CHECKING:
    from optkit.api.bench import BenchReport
    from optkit.bench.rates import FoundRate, Sweep
    from optkit.bench.workload import WorkloadConfig

NUM_PROMPTS, NUM_PROMPTS_OF_RATES = 20, 60
SIDES, LOAD, PROMISES, RATES, OUTPUT = "Sides", "Load", "Promises", "Rates", "Output"  # headings of the help


def _bounds_help(option: str) -> str:
    return f"Bounds in milliseconds on ttft, tpot and e2e, as in {option} ttft:700,tpot:50."


def bench(
    artifact: Annotated[
        str | None,
        typer.Argument(help="Artifact directory to serve and measure, a model, or a URL; or give --url."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Measure a running server, as in http://127.0.0.1:8000. OPTKIT_API_KEY holds the API key, if any.",
            rich_help_panel=SIDES,
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Model to compare with, as in smollm2-135m: unoptimized on optkit's runtime, and in transformers.",
            rich_help_panel=SIDES,
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="A further side: artifact, model or URL, perhaps named, as in old=artifact-1. May be repeated.",
            rich_help_panel=SIDES,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Model with the tokenizer for the prompts. Default: the first side with one, else --baseline.",
            rich_help_panel=SIDES,
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help=f"Requests of each side in each round. Default: {NUM_PROMPTS}; "
            f"{NUM_PROMPTS_OF_RATES} with --sweep and --find-rate.",
            min=1,
            rich_help_panel=LOAD,
        ),
    ] = None,
    input_len: Annotated[
        int,
        typer.Option(
            "--input-len", "--random-input-len", help="Tokens of each prompt.", min=1, rich_help_panel=LOAD
        ),
    ] = 512,
    output_len: Annotated[
        int,
        typer.Option(
            "--output-len",
            "--random-output-len",
            help="Output tokens of each request; no request stops early.",
            min=1,
            rich_help_panel=LOAD,
        ),
    ] = 64,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            help="Most requests in flight. Default: 1 without --request-rate and --trace, else no limit.",
            min=1,
            rich_help_panel=LOAD,
        ),
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second, arriving at random (Poisson), as in 2.5; inf sends all at once. With --trace: "
            "stretch its arrivals to that rate. With --find-rate: the first rate. Default: clients without pauses.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of the arrivals of --request-rate (gamma): 1 is Poisson, below 1 comes in bursts.",
            rich_help_panel=LOAD,
        ),
    ] = 1.0,
    shared_prefix_len: Annotated[
        int,
        typer.Option(
            help="Tokens that prompts share at their start, before --input-len further ones.",
            min=0,
            rich_help_panel=LOAD,
        ),
    ] = 0,
    num_prefixes: Annotated[
        int,
        typer.Option(help="Different shared prefixes, taken in turn.", min=1, rich_help_panel=LOAD),
    ] = 1,
    turns: Annotated[
        int,
        typer.Option(
            help="Requests of a conversation: each sends the history and --input-len further tokens, when the one "
            "before has ended.",
            min=1,
            rich_help_panel=LOAD,
        ),
    ] = 1,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay a trace: arrivals, lengths and shared prefixes of Mooncake's JSON lines or Azure's CSV. The "
            "first --num-prompts requests.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    trace_scale: Annotated[
        str,
        typer.Option(help="Factor on the lengths of --trace, as in 1/32.", rich_help_panel=LOAD),
    ] = "1",
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of prompts and arrivals: the same seed gives the same requests.", rich_help_panel=LOAD
        ),
    ] = 0,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Rounds; the sides take turns in each. The table shows medians over rounds. Default: 3; 6 with "
            "--against and --assert, since an interval needs 6; 1 with --sweep.",
            min=1,
            rich_help_panel=LOAD,
        ),
    ] = None,
    num_warmups: Annotated[
        int,
        typer.Option(
            help="Unmeasured requests of each side before the first round.", min=0, rich_help_panel=LOAD
        ),
    ] = 2,
    goodput: Annotated[
        str | None,
        typer.Option(
            help=_bounds_help("--goodput") + " Shows the requests per second within all bounds.",
            rich_help_panel=PROMISES,
        ),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            help=_bounds_help("--slo")
            + " --slo recipe takes the bounds of the artifact's recipe. Exit code 3 if the p95 misses a bound; with "
            "--sweep, which goes to saturation, the same as --goodput.",
            rich_help_panel=PROMISES,
        ),
    ] = None,
    assertions: Annotated[
        list[str] | None,
        typer.Option(
            "--assert",
            help="A claim to check with 95 % confidence, as in 'ttft_p95<700ms', '95%:ttft<700ms,tpot<50ms' or "
            "'ttft_p50 <= 0.5x baseline'. Exit code 5 unless it is held. May be repeated.",
            rich_help_panel=PROMISES,
        ),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="Measure from one request at a time to saturation.",
            rich_help_panel=RATES,
        ),
    ] = False,
    find_rate: Annotated[
        bool,
        typer.Option(
            "--find-rate",
            help="Find the highest rate that holds --slo or every --assert, by doubling and bisection.",
            rich_help_panel=RATES,
        ),
    ] = False,
    probes: Annotated[
        int | None,
        typer.Option(
            help="Rates to try: at most so many with --find-rate (7), between the ends with --sweep (5).",
            min=1,
            rich_help_panel=RATES,
        ),
    ] = None,
    definitions: Annotated[
        str,
        typer.Option(
            help="Formulas of the metrics: optkit, vllm, aiperf, guidellm or llmperf.", rich_help_panel=OUTPUT
        ),
    ] = "optkit",
    save_result: Annotated[
        Path | None,
        typer.Option(help="JSON file to write: every timestamp, and the summaries.", rich_help_panel=OUTPUT),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON on stdout instead of text.", rich_help_panel=OUTPUT),
    ] = False,
) -> None:
    """Measure latency and throughput over HTTP, and compare with the unoptimized model or any other side.

    All sides get identical prompts at identical arrivals, in interleaved rounds, so drift of the machine cancels in a
    ratio. A prompt has exactly --input-len tokens of real text and, unless asked for, shares no prefix with another
    prompt, so no prefix cache can help. The output shows the formula of each metric, since benchmark tools use the
    same name for different metrics.

    TTFT (time to first token) depends on prompt length and load: state both with every number.

    Intervals are for 95 % confidence and resample rounds, not requests. A percentile is "not shown" below its sample
    size: a p95 below 59 requests, a p99 below 299. "do not trust this" names what speaks against a run: a busy machine
    or client, hits of a prefix cache, latencies that drift, a growing queue.

    With an artifact and --baseline, the last lines say whether the artifact is faster than each side by its recipe's
    objective; with the objective memory, whether its requests are faster.

    Exit codes: 0 done, 2 wrong usage or no server, 3 the p95 of the first side misses a bound of --slo (with
    --find-rate: no rate holds; never with --sweep), 4 the artifact is slower than one of the sides, by the objective of
    its recipe and in every round, 5 a claim of --assert failed or is not shown.

    Examples:

    optkit bench artifact/ --baseline smollm2-135m --slo ttft:700

    optkit bench new/ --against old/ --assert 'ttft_p50 <= 1.02x old'

    optkit bench artifact/ --find-rate --slo ttft:700,tpot:50

    optkit bench artifact/ --trace conversation.jsonl --trace-scale 1/32
    """
    if sweep and find_rate:
        raise UserError("--sweep and --find-rate are two runs", where="optkit bench", fix="give one of them")
    if save_result:
        check_place(save_result)
    scale = scale_of(trace_scale)
    if sweep or find_rate:
        own = {"--max-concurrency": max_concurrency, "--definitions": definitions != "optkit"}
        _refuse(own, "--sweep" if sweep else "--find-rate")
        load = _load(
            num_prompts or NUM_PROMPTS_OF_RATES, input_len, output_len, seed, burstiness, shared_prefix_len,
            num_prefixes, turns, trace, scale,
        )  # fmt: skip
        with console.spinner("preparing") as progress:
            found: FoundRate | Sweep
            if find_rate:
                others = {
                    "--against": against,
                    "--baseline": baseline,
                    "--goodput": goodput,
                    "--rounds": rounds,
                }
                _refuse(others, "--find-rate")
                found = rates.find_rate(
                    artifact, load=load, url=url, slo=slo, assertions=assertions or (), start=request_rate,
                    probes=probes or 7, num_warmups=num_warmups, tokenizer=tokenizer,
                    progress=lambda event: progress(event.text),
                )  # fmt: skip
            else:
                _refuse({"--assert": assertions, "--request-rate": request_rate}, "--sweep")
                found = rates.sweep(
                    artifact, load=load, url=url, baseline=baseline, against=against or (), slo=slo, goodput=goodput,
                    rounds=rounds or 1, rates=probes or 5, num_warmups=num_warmups, tokenizer=tokenizer,
                    progress=lambda event: progress(event.text),
                )  # fmt: skip
        with _saving(found, save_result):
            held = print_rates(found, as_json)
        if not held:
            raise typer.Exit(SLO_MISSED)
        return
    _refuse({"--probes": probes}, "a single load")
    with console.spinner("preparing") as progress:
        report = measure(
            artifact, url=url, baseline=baseline, against=against or (), num_prompts=num_prompts or NUM_PROMPTS,
            input_len=input_len, output_len=output_len, max_concurrency=max_concurrency, request_rate=request_rate,
            burstiness=burstiness, shared_prefix_len=shared_prefix_len, num_prefixes=num_prefixes, turns=turns,
            trace=trace, trace_scale=scale, rounds=rounds, num_warmups=num_warmups, slo=slo, goodput=goodput,
            assertions=assertions or (), definitions=definitions, tokenizer=tokenizer, seed=seed,
            progress=lambda event: progress(event.text),
        )  # fmt: skip
    with _saving(report, save_result):
        print_report(report, as_json)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


@contextmanager
def _saving(measured: BenchReport | FoundRate | Sweep, file: Path | None) -> Iterator[None]:
    """Save the result after the body has printed it: a full disk costs no table, a closed pipe no result."""
    try:
        yield
    finally:
        if file:
            measured.save(file)


def _load(
    num_prompts: int,
    input_len: int,
    output_len: int,
    seed: int,
    burstiness: float,
    shared_prefix_len: int,
    num_prefixes: int,
    turns: int,
    trace: Path | None,
    scale: float,
) -> WorkloadConfig:
    """The requests of --sweep and --find-rate, which bring the rates."""
    need_extra("serve", "optkit bench")
    from optkit.bench.workload import WorkloadConfig

    whole = -(-num_prompts // turns) * turns
    return WorkloadConfig(
        whole, input_len, output_len, None, None, seed, burstiness, shared_prefix_len, num_prefixes, turns,
        None if trace is None else str(trace), scale,
    )  # fmt: skip


def _refuse(given: Mapping[str, object], option: str) -> None:
    """Refuse options that would be without effect; None, False and an empty list are options not given."""
    for name, value in given.items():
        if value is not None and value is not False and value != []:
            raise UserError(
                f"{name} has no effect with {option}", where="optkit bench", fix=f"leave out {name}"
            )
