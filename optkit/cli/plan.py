"""``optkit plan``: predicted times, memory, bottlenecks and replicas of a recipe on a machine, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optkit.cli import console
from optkit.cli.tables import print_table

if TYPE_CHECKING:
    from optkit.plan.planner import ServingPlan

MOST_HINTS = 3
WORST = 0.8  # gain by the objective: a pass below helps a single phase at too high a price


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="Model: a directory with config.json (no weights needed), a .gguf file, a Hub id, or smollm2-135m."
        ),
    ],
    recipe: Annotated[
        str,
        typer.Option("--recipe", "-r", help="Name of a shipped recipe (optkit recipe list), or a YAML file."),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help="Machine to plan for, such as h100, l40s or graviton4; 'here' is this CPU. "
            "Default: the GPU that is here, else the recipe's target."
        ),
    ] = None,
    hardware: Annotated[
        Path | None,
        typer.Option(
            is_eager=True,
            callback=lambda ctx, file: _with_hardware(ctx, file),
            help="YAML file with further machines (docs/planning.md has an example).",
        ),
    ] = None,
    list_targets: Annotated[
        bool,
        typer.Option(
            "--list-targets",
            is_eager=True,
            callback=lambda ctx, asked: _asked(ctx, asked),
            help="Print all machines with figures and sources, and exit.",
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Load: a trace of arrivals and lengths, Mooncake's JSON lines or Azure's CSV, as for optkit bench."
        ),
    ] = None,
    trace_scale: Annotated[str, typer.Option(help="Factor on the lengths of --trace, as in 1/32.")] = "1",
    slo: Annotated[
        str | None,
        typer.Option(
            help="Objective for the number of replicas: 'ttft_p95<700ms@4rps', or 'ttft:700,tpot:50'."
        ),
    ] = None,
    clients: Annotated[
        int, typer.Option(help="Clients that send a request at once, for a predicted wave.", min=1, max=1024)
    ] = 8,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure steps of the model on this machine first, with made-up weights: 30 seconds.",
        ),
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a recipe value, as in runtime.max_num_seqs=8. May be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")] = False,
) -> None:
    """Predict times, memory and bottlenecks of a recipe on a machine, before any weight is read.

    Times come from the work of each op and the machine's ceilings: measured on the local CPU, from the vendor's data
    sheet for other machines. Times on a CPU count the share of the ceilings reached by optkit's kernels, times on a
    GPU are a floor.
    With --trace or --slo the plan has the number of replicas for the load; docs/planning.md has models and assumptions.

    Example: optkit plan smollm2-135m --recipe ttft-cpu --slo 'ttft_p95<700ms@4rps'
    """
    from optkit.bench.traces import scale_of
    from optkit.plan.planner import Request
    from optkit.plan.planner import plan as make_plan
    from optkit.recipe.load import load_recipe

    request = Request(
        model=model,
        recipe=load_recipe(recipe, overrides or []),
        target=target,
        hardware=hardware,
        trace=trace,
        scale=scale_of(trace_scale),
        slo=slo,
        calibrate=calibrate,
        clients=clients,
    )
    with console.spinner("planning") as progress:
        found = make_plan(request, progress)
    if as_json:
        console.print_json(found.to_dict())
        return
    show(found)


def _with_hardware(ctx: typer.Context, hardware: Path | None) -> Path | None:
    """Show the machines where ``--list-targets`` came first: eager options are handled in the order of the line."""
    if ctx.params.get("list_targets"):
        show_machines(hardware)
    return hardware


def _asked(ctx: typer.Context, asked: bool) -> bool:
    """Show the machines, or leave that to ``_with_hardware`` where ``--hardware`` is still to come."""
    if asked and "hardware" in ctx.params:
        show_machines(ctx.params["hardware"])
    return asked


def show_machines(hardware: Path | None) -> None:
    """Print all machines with their figures and sources, and exit."""
    from rich.table import Table

    from optkit.plan.table import all_rows

    known = all_rows(hardware)
    grid = Table("name", "fp32", "bf16", "fp8", "int8", "GB/s", "GB", "not verified", "source", box=None)
    for name, row in known.items():
        rates = (row.rates.fp32, row.rates.bf16, row.rates.fp8, row.rates.int8)
        cells = [f"{rate:g}" if rate else "-" for rate in rates]
        grid.add_row(
            name,
            *cells,
            f"{row.bandwidth:g}",
            f"{row.memory:g}",
            ", ".join(row.unverified) or "-",
            row.source,
        )
    print_table(grid)
    console.stdout.print("rates in 1e12 operations/s, dense; 'here' is this CPU, measured", style="dim")
    raise typer.Exit


def show(found: ServingPlan) -> None:
    """Print the plan, about a page."""
    out, target = console.stdout, found.machine.target
    out.print(f"{found.recipe.name} on {found.model}, {found.machine.title}")
    out.print(f"{ceilings(target)}; {found.machine.source}", style="dim")
    out.print(f"times: {found.source}", style="dim")
    for note in found.notes:
        out.print(f"note: {note}")
    print_table(times_table(found))
    for line in [*clients_lines(found), *memory_lines(found), *help_lines(found), *replica_lines(found)]:
        out.print(line)


def ceilings(target: Any) -> str:
    """The ceilings of ``target`` in a line."""
    rates = {
        "fp32": target.fp32_flops,
        "bf16": target.bf16_flops,
        "fp8": target.fp8_flops,
        "int8": target.int8_ops,
    }
    known = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in rates.items() if rate)
    return f"{known} T/s, {target.memory_bandwidth / 1e9:.4g} GB/s, {target.memory_bytes / 1e9:.4g} GB"


def times_table(found: ServingPlan) -> Any:
    """A row a step: time, roofline, work, traffic, and the cause of most of the time."""
    from rich.table import Table

    grid = Table(
        "step", "predicted", "roofline", "GFLOP", "MB read", "bound by", title="", title_justify="left"
    )
    for (label, count), time in found.times.items():
        name = f"{label}, {count} sequences" if count > 1 else label
        share = time.parts[time.bound] / time.seconds if time.seconds else 0.0
        cells = (milliseconds(time.seconds), milliseconds(time.floor), f"{time.flops / 1e9:.3g}")
        grid.add_row(name, *cells, f"{time.num_bytes / 1e6:.4g}", f"{time.bound}, {share:.0%}")
    return grid


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def clients_lines(found: ServingPlan) -> list[str]:
    wave = found.clients
    if wave is None:
        return []
    return [
        f"{wave['clients']} clients at once, {wave['prompt_tokens']} in, {wave['output_tokens']} out: "
        f"TTFT mean {milliseconds(wave['ttft_mean_seconds'])}, last {milliseconds(wave['ttft_max_seconds'])}; "
        f"TPOT {milliseconds(wave['tpot_mean_seconds'])}; {wave['output_tokens_per_second']:.4g} tokens/s"
    ]


def memory_lines(found: ServingPlan) -> list[str]:
    """Weights, KV and requests at once."""
    memory, gb = found.memory, 1e9
    head = (
        f"memory: {memory.available / gb:.4g} GB to use; weights {memory.weights / gb:.3g}, largest step "
        f"{memory.activations / gb:.2g}, process {memory.process / gb:.2g}, left for KV {memory.most_kv / gb:.3g} GB"
    )
    if not memory.fits:
        return [head, "the model does NOT FIT this machine with this recipe"]
    kv = f"KV cache: {memory.kv_cache / gb:.3g} GB, {memory.kv_token / 1e3:.3g} kB a token"
    state = f", {memory.state_sequence / 1e6:.3g} MB of state a request" if memory.state_sequence else ""
    rooms = [
        f"{count} of {context} tokens ({memory.limit[context]}; {memory.most_requests[context]} with all memory)"
        for context, count in memory.requests.items()
    ]
    return [head, kv + state, f"requests at once: {', '.join(rooms)}"]


def help_lines(found: ServingPlan) -> list[str]:
    """The passes with the highest gain: of the recipe, and of the passes left out."""
    objective = found.recipe.objective
    inside = sorted((one for one in found.passes if one.sites), key=lambda one: -one.objective)
    lines = []
    if inside:
        listed = ", ".join(f"{one.name} {one.objective:.2f}x" for one in inside[:MOST_HINTS])
        lines.append(f"gain by {objective}, passes of the recipe: {listed}")
    others = [one for one in found.left_out if one.objective > WORST]
    if others:
        listed = ", ".join(hint(one, objective) for one in others[:MOST_HINTS])
        lines.append(f"not in the recipe: {listed} (quality: optkit optimize measures it)")
    else:
        lines.append("no other pass is predicted to gain")
    return lines


def hint(one: Any, objective: str) -> str:
    """``w4a8 1.10x (decode@513 1.60x)``: by the objective, and the step with the highest gain."""
    best = max(one.steps, key=lambda label: one.steps[label])
    return f"{one.name} {one.objective:.2f}x by {objective} ({best} {one.steps[best]:.2f}x)"


def replica_lines(found: ServingPlan) -> list[str]:
    """The number of replicas with the state of each, and the assumptions."""
    need = found.replicas
    if need is None:
        return []
    load = f"{need.slo} under {need.requests} requests, {need.rate:.3g} requests/s"
    if need.fewest is None:
        return [f"replicas: NONE hold {load}: {need.cause}"]
    each = need.fewest
    ttft = ", ".join(
        f"{name} {milliseconds(s)}" for name, s in zip(("p50", "p95", "p99"), each.ttft, strict=True)
    )
    one = need.single
    alone = f"; one replica: {one.saturated}" if one.saturated else ""
    return [
        f"replicas: {each.replicas} for {load}",
        f"  each {each.utilization:.0%} used, {each.batch:.2g} decoding, TTFT {ttft}, "
        f"TPOT {milliseconds(each.tpot)}{alone}",
        *(f"  assumed: {line}" for line in need.to_dict()["assumptions"]),
    ]
