"""A plan of a recipe on a machine: times, memory, what binds, what would help, and replicas for a load.

No weight is read: the model is built on the meta device, as for ``optkit optimize --dry-run``, and the passes run on
that graph. A configuration alone is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from optkit.bench.slo import Slo, parse_slo
from optkit.checkpoint.locate import resolve
from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point
from optkit.machine.load import disturbance
from optkit.passes.base import PassContext
from optkit.passes.resolve import Alternatives, ResolvedPass, resolve_passes
from optkit.plan import replicas, trace
from optkit.plan.calibrate import Anchor, Calibrated, calibrate
from optkit.plan.gains import Chain, Gain, costs_of, gains, left_out, run_chain
from optkit.plan.memory import MemoryPlan, memory_plan
from optkit.plan.steps import StepModel, StepTime
from optkit.plan.table import Machine, machine
from optkit.plan.virtual import Arrival, clients
from optkit.recipe.schema import Recipe
from optkit.runtime.scheduling.config import SchedulerConfig

PROMPTS = (128, 512, 1024, 2048)  # tokens
CONTEXTS = (512, 2048, 8192, 32768)  # tokens
CLIENTS = 8
GRID = 8  # lengths an octave at which a prefill is predicted for a load
FASTER = 0.95  # of the roofline: layers below show ceilings that are too low
STATISTICS = {"p50": 0, "p95": 1, "p99": 2}  # of a predicted TTFT; TPOT is a mean

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """The input of a plan.

    Attributes:
        target: the machine's name; None is the recipe's machine, or the local GPU.
        hardware: a YAML file with rows of the user.
        trace: a file of requests; ``scale`` multiplies the lengths.
        slo: an objective as text, in the form of ``optkit.bench.slo``.
        calibrate: measures steps on the local machine, for 30 seconds at most.
    """

    model: str
    recipe: Recipe
    target: str | None = None
    hardware: Path | None = None
    trace: Path | None = None
    scale: float = 1.0
    slo: str | None = None
    calibrate: bool = False
    clients: int = CLIENTS


@dataclass(frozen=True)
class Replicas:
    """The fewest replicas for an objective under a load; ``fewest`` is None where no number is enough."""

    slo: str
    rate: float
    requests: int
    fewest: replicas.Load | None
    single: replicas.Load
    cause: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "slo": self.slo,
            "requests_per_second": self.rate,
            "requests": self.requests,
            "replicas": self.fewest.replicas if self.fewest else None,
            "each": self.fewest.to_dict() if self.fewest else None,
            "with_one": self.single.to_dict(),
            "cause": self.cause,
            "assumptions": list(replicas.ASSUMPTIONS),
        }


@dataclass(frozen=True)
class ServingPlan:
    """A finished plan; ``times`` are by ``Point.label`` and number of sequences."""

    model: str
    recipe: Recipe
    machine: Machine
    source: str
    times: dict[tuple[str, int], StepTime]
    memory: MemoryPlan
    passes: list[Gain]
    left_out: list[Gain]
    anchors: list[Anchor]
    clients: dict[str, Any] | None = None
    replicas: Replicas | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON data; times in seconds, sizes in bytes."""
        steps = [
            {"step": label, "sequences": count, **time.to_dict()}
            for (label, count), time in self.times.items()
        ]
        return {
            "model": self.model,
            "recipe": self.recipe.name,
            "machine": self.machine.to_dict(),
            "prediction": self.source,
            "calibration": [anchor.to_dict() for anchor in self.anchors],
            "steps": steps,
            "clients": self.clients,
            "memory": self.memory.to_dict(),
            "passes": [one.to_dict() for one in self.passes],
            "left_out": [one.to_dict() for one in self.left_out],
            "replicas": self.replicas.to_dict() if self.replicas else None,
            "notes": self.notes,
        }


def plan(request: Request, progress: Progress = lambda text: None) -> ServingPlan:
    """The plan of ``request``.

    Raises:
        UserError: an unknown model, machine or pass, a wrong file, or a recipe that the machine can't run.
    """
    from optkit.pipeline.dry_graph import capture_planned

    recipe = request.recipe
    slo = objective(request.slo, request.trace) if request.slo is not None else None
    chosen = machine(request.target, recipe.target, request.hardware)
    arrivals = load_of(request, slo)
    passes = resolve_passes(recipe)
    source = resolve(request.model, progress, weights=False)
    progress("capturing the model without weights")
    captured = capture_planned(source.directory, recipe.runtime.max_model_len)
    progress("running the passes on shapes")
    context = PassContext(chosen.target)
    predict = partial(costs_of, recipe=recipe, model=lambda graph: StepModel(graph, chosen.target))
    chain = chain_of(captured, passes, context, lambda graph: predict(graph).objective)
    model = StepModel(chain.result, chosen.target)
    busy = busy_note() if request.calibrate and chosen.target.source == "measured" else ""
    steps = calibrate(
        chain.result, model, recipe, chosen.target, measure=request.calibrate, progress=progress
    )
    length = min(captured.meta.max_model_len, recipe.runtime.max_model_len or captured.meta.max_model_len)
    contexts = [context for context in CONTEXTS if context <= length] or [length]
    memory = memory_plan(chain.result, recipe, chosen.target, contexts)
    progress("trying passes that the recipe leaves out")
    others = left_out(chain, context, predict)
    return ServingPlan(
        model=source.name,
        recipe=recipe,
        machine=chosen,
        source=source_of(steps, request, chosen),
        times=times_of(steps, recipe, length, memory),
        memory=memory,
        passes=gains(chain, predict),
        left_out=others,
        anchors=steps.anchors,
        clients=clients_of(steps, recipe, memory, request.clients),
        replicas=replicas_of(steps, recipe, memory, arrivals, slo),
        notes=[*source.notes, *captured.notes, *filter(None, [chosen.note, low_ceilings(steps), busy])],
    )


def objective(text: str, file: Path | None) -> Slo:
    """The objective in ``text``; of a share of the requests each bound gets the percentile of the share.

    Raises:
        UserError: an objective without a load, or a term without a prediction.
    """
    slo = parse_slo(text)
    if file is None and (slo.load is None or slo.load.rate is None):
        raise UserError(
            "an objective needs a load", where=f"--slo {slo}", fix="add --trace FILE, or @4rps at its end"
        )
    if slo.load is not None:
        check_rate(slo.load.rate, f"--slo {slo}")
    if slo.share is not None:
        share = f"p{100 * slo.share:g}"
        slo = replace(slo, terms=tuple(replace(term, statistic=share) for term in slo.terms))
    for term in slo.terms:
        if term.metric not in ("ttft", "tpot", "e2e") or not term.is_upper or term.side is not None:
            raise UserError(
                f"{term} can't be planned", where="--slo", fix="plan takes upper bounds on ttft, tpot and e2e"
            )
        if term.metric != "tpot" and term.statistic not in STATISTICS:
            raise UserError(
                f"{term} can't be planned", where="--slo", fix="plan takes p50, p95 or p99 of ttft and e2e"
            )
    return slo


def check_rate(rate: float | None, where: str) -> None:
    """Refuse a load of clients, and rates without a plan.

    Raises:
        UserError: see above.
    """
    if rate is None:
        raise UserError("the load of a plan is a rate", where=where, fix="write @4rps, or nothing after @")
    if not trace.LEAST_RATE <= rate <= trace.MOST_RATE:
        fix = f"give {trace.LEAST_RATE:g} to {trace.MOST_RATE:g}"
        raise UserError(f"no rate for a plan: {rate:g} requests/s", where=where, fix=fix)


def load_of(request: Request, slo: Slo | None) -> list[Arrival]:
    """The requests of the trace, at the rate of the objective if any; else a Poisson load; or none."""
    rate = slo.load.rate if slo and slo.load else None
    if request.trace is not None:
        rows = trace.read_trace(request.trace, request.scale)
        speed = rate / trace.mean_rate(rows) if rate else 1.0
        return [Arrival(one.seconds / speed, one.prompt, one.output) for one in rows]
    return trace.poisson(request.recipe.workload, rate) if rate else []


def chain_of(
    graph: Graph, passes: Sequence[Any], context: PassContext, cost: Callable[[Graph], float]
) -> Chain:
    """The passes run in order; of alternatives the candidate with the least predicted cost."""
    chain = Chain([], [graph], [])
    for item in passes:
        candidates = item.candidates if isinstance(item, Alternatives) else [[item]]
        trials = [run_chain(chain.result, one, context) for one in candidates]
        best = trials[0] if len(trials) == 1 else min(trials, key=lambda trial: cost(trial.result))
        found: list[ResolvedPass] = best.passes
        chain = Chain(
            [*chain.passes, *found], [*chain.graphs, *best.graphs[1:]], [*chain.records, *best.records]
        )
    return chain


def source_of(steps: Calibrated, request: Request, chosen: Machine) -> str:
    """The origin of the predicted times, in words."""
    if steps.anchors:
        return f"corrected by {len(steps.anchors)} steps measured on this machine"
    if request.calibrate:
        reason = (
            "a calibration needs the machine"
            if chosen.target.source != "measured"
            else "nothing was measured"
        )
        return f"{steps.model.shares.source}; not calibrated: {reason}"
    return steps.model.shares.source


def busy_note() -> str:
    """A line about other work on a machine that is about to be measured; empty without."""
    if not (used := disturbance()):
        return ""
    return (
        f"{used:.0%} of the processors were in use before the calibration: its times are too long, and are kept; "
        "calibrate again on a quiet machine"
    )


def low_ceilings(steps: Calibrated) -> str:
    """A line about ceilings measured beside other work, where measured layers beat the roofline; else empty."""
    faster = [anchor.point.label for anchor in steps.anchors if anchor.measured < FASTER * anchor.floor]
    if not faster:
        return ""
    listed = ", ".join(faster)
    return (
        f"layers run faster than the roofline ({listed}): optkit doctor --refresh measures the ceilings again"
    )


def times_of(
    steps: Calibrated, recipe: Recipe, length: int, memory: MemoryPlan
) -> dict[tuple[str, int], StepTime]:
    """The predicted time of each prompt length, and of decodes of one, several and all sequences."""
    budget = recipe.runtime.max_num_batched_tokens
    prompts = sorted({min(tokens, length) for tokens in (*PROMPTS, *recipe.workload.prompt_tokens)})
    found = {(f"prefill {tokens}", 1): steps.prefill(tokens, budget) for tokens in prompts}
    context = min(length, max(recipe.workload.prompt_tokens) + 1)
    counts = sorted({1, min(CLIENTS, recipe.runtime.max_num_seqs), recipe.runtime.max_num_seqs})
    for count, place in [*((count, context) for count in counts), (1, length)]:
        point = Point(count, count, place)
        found[point.label, count] = steps.decode(count, place)
    return found


def clients_of(steps: Calibrated, recipe: Recipe, memory: MemoryPlan, count: int) -> dict[str, Any] | None:
    """The predicted times of clients sending a request of the workload at once; None where nothing fits."""
    workload, config = recipe.workload, memory.config
    prompt = sorted(workload.prompt_tokens)[len(workload.prompt_tokens) // 2]
    if config is None or config.refusal(prompt, workload.output_tokens):
        return None
    seconds = lambda step: steps.step(step).seconds  # noqa: E731
    return clients(config, seconds, count, prompt, workload.output_tokens)


def replicas_of(
    steps: Calibrated, recipe: Recipe, memory: MemoryPlan, arrivals: Sequence[Arrival], slo: Slo | None
) -> Replicas | None:
    """The replicas for ``arrivals``; None without a load.

    Raises:
        UserError: a request of the load never fits.
    """
    if not arrivals:
        return None
    config = memory.config
    name = str(slo) if slo else "no saturation"
    if config is None:
        raise UserError("the model does not fit the machine, so no number of replicas serves the load")
    for one in arrivals:
        if refused := config.refusal(one.prompt, one.output):
            raise UserError(
                f"a request of the load can't be served: {refused}",
                where=f"{one.prompt} tokens in, {one.output} out",
                fix="scale the lengths with --trace-scale, or raise kv_cache_bytes and max_model_len",
            )
    demand = demand_of(steps, recipe.runtime.max_num_batched_tokens, config)
    output = sum(one.output for one in arrivals) / len(arrivals)
    holds = partial(meets, slo=slo, output=output)
    found, last = replicas.fewest(arrivals, demand, holds)
    single = replicas.load(arrivals, 1, demand)
    cause = "" if found else missed(last, slo, output)
    if last.saturated and last.replicas == len(arrivals):
        cause += f"; so many requests do not tell how many more than {last.replicas} replicas would"
    return Replicas(name, trace.mean_rate(arrivals), len(arrivals), found, single, cause)


def demand_of(steps: Calibrated, budget: int, config: SchedulerConfig) -> replicas.Demand:
    """The work of requests by the predictions of steps of up to ``budget`` tokens."""
    chunk = Point(budget, 1, budget)

    def beside(batch: int, context: int) -> float:
        both = steps.step((chunk, Point(batch, batch, context))).seconds
        return max(0.0, both - steps.step((chunk,)).seconds)

    return replicas.Demand(
        prefill=on_grid(lambda tokens: steps.prefill(tokens, budget).seconds),
        decode=cache(lambda batch, context: steps.decode(batch, context).seconds),
        most_running=lambda context: min(
            config.max_num_seqs, config.num_blocks // max(1, config.blocks_needed(context, 1))
        ),
        chunks=lambda tokens: -(-tokens // budget),
        beside=cache(beside),
    )


def on_grid(seconds: Callable[[int], float]) -> Callable[[int], float]:
    """``seconds`` at ``GRID`` lengths an octave, and lines between: a trace has thousands of lengths."""
    known = cache(seconds)

    def at(tokens: int) -> float:
        place = math.floor(GRID * math.log2(tokens))
        low, high = (round(2 ** (number / GRID)) for number in (place, place + 1))
        if low >= tokens or high <= tokens:
            return known(tokens)
        share = (tokens - low) / (high - low)
        return (1 - share) * known(low) + share * known(high)

    return cache(at)


def meets(load: replicas.Load, slo: Slo | None, output: float) -> bool:
    """True where the replicas are not saturated and hold every bound."""
    return (
        not load.saturated and all(term.met(value_of(term, load, output)) for term in slo.terms)
        if slo
        else (not load.saturated)
    )


def missed(load: replicas.Load, slo: Slo | None, output: float) -> str:
    """The bounds missed even by a single request a replica, as text."""
    if load.saturated:
        return load.saturated
    found = [
        f"{term}: {value_of(term, load, output):.0f} ms with {load.replicas} replicas"
        for term in (slo.terms if slo else ())
        if not term.met(value_of(term, load, output))
    ]
    return "; ".join(found)


def value_of(term: Any, load: replicas.Load, output: float) -> float:
    """The predicted value of a bound's metric in milliseconds; of ``e2e`` the TTFT and the tokens after it."""
    if term.metric == "tpot":
        return load.tpot * 1e3
    ttft = load.ttft[STATISTICS[term.statistic]]
    return 1e3 * (ttft if term.metric == "ttft" else ttft + (output - 1) * load.tpot)
