"""The gain of each pass of a recipe, and of passes left out.

Gains are of predicted costs, by the recipe's objective (``optkit.pipeline.objective``) and by phase. A pass left out
is put at the start of the pass's stage, before the rest of the recipe, so a quantizer of fewer bits takes the layers
first. Quality is not predicted: ``optkit optimize`` measures quality.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from optkit.errors import OptkitError
from optkit.evaluation.speed import workload_points
from optkit.graph.ir import Graph
from optkit.passes.base import PassContext, Stage
from optkit.passes.resolve import ResolvedPass
from optkit.pipeline import objective
from optkit.pipeline.runner import keep_unmeasured, run_pass
from optkit.plan.steps import StepModel
from optkit.recipe.schema import PassEntry, Recipe

# Passes whose gain follows from shapes alone, with options that need nothing from the user.
CANDIDATES: dict[str, dict[str, Any]] = {
    "latent_kv": {},
    "fuse_qkv": {},
    "fuse_gate_up": {},
    "fuse_add_rms_norm": {},
    "select_logits_rows": {},
    "int8": {"group_size": 32, "lm_head": True, "weight_only": ["lm_head"]},
    "w4a8": {"group_size": 32},
    "gptq": {"scheme": "W4A16"},
    "fp8": {},
    "flash_attention": {},
    "kv_int8": {},
    "kv_fp8": {},
}
GPU_ONLY = {"fp8", "kv_fp8"}  # on a CPU optkit has no kernels for these types
LEAST = 1.01  # gains below are no gain


@dataclass(frozen=True)
class Gain:
    """The predicted gain of a pass: cost before over cost after, by objective and by phase; above 1 is better."""

    name: str
    sites: int
    objective: float
    steps: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Costs:
    """Predicted costs of a graph: of the objective, and seconds of each workload point."""

    objective: float
    steps: dict[str, float]


Predict = Callable[[Graph], Costs]
Model = Callable[[Graph], StepModel]


def costs_of(graph: Graph, recipe: Recipe, model: Model) -> Costs:
    """The predicted costs of ``graph`` on the workload of ``recipe``."""
    steps = model(graph)
    budget = recipe.runtime.max_num_batched_tokens
    seconds = {point.label: steps.at(point, budget).seconds for point in workload_points(recipe)}
    if recipe.objective == "memory":
        token = sum(spec.token_bytes for spec in graph.meta.kv_specs)
        return Costs(objective.memory(recipe.workload, graph.num_bytes(), token), seconds)
    return Costs(objective.TIMES[recipe.objective](recipe.workload, seconds), seconds)


def gain(name: str, sites: int, before: Costs, after: Costs) -> Gain:
    steps = {label: seconds / after.steps[label] for label, seconds in before.steps.items()}
    return Gain(name, sites, before.objective / after.objective, steps)


@dataclass(frozen=True)
class Chain:
    """The passes of a recipe with the graph before each, and the graph after all."""

    passes: list[ResolvedPass]
    graphs: list[Graph]
    records: list[Any]

    @property
    def result(self) -> Graph:
        return self.graphs[-1]


def run_chain(graph: Graph, passes: Sequence[ResolvedPass], context: PassContext) -> Chain:
    """Run ``passes`` on the planned ``graph``."""
    graphs, records = [graph], []
    for one in passes:
        after, record = run_pass(graphs[-1], one, context, keep_unmeasured)
        graphs.append(after)
        records.append(record)
    return Chain(list(passes), graphs, records)


def gains(chain: Chain, predict: Predict) -> list[Gain]:
    """The gain of each pass of the chain over the graph before it."""
    costs = [predict(graph) for graph in chain.graphs]
    rows = zip(chain.passes, chain.records, costs, costs[1:], strict=False)
    return [gain(one.entry.name, len(record.sites), before, after) for one, record, before, after in rows]


def left_out(chain: Chain, context: PassContext, predict: Predict) -> list[Gain]:
    """The gains of passes missing in the chain, the best first; passes without a gain or a site are dropped."""
    base, found = predict(chain.result), []
    used = {one.entry.pass_name for one in chain.passes}
    for name, options in CANDIDATES.items():
        if name in used or (name in GPU_ONLY and context.target.kind != "cuda"):
            continue
        candidate = resolved(name, options)
        place = place_of(candidate, chain.passes)
        try:
            trial = run_chain(chain.graphs[place], [candidate, *chain.passes[place:]], context)
        except OptkitError:  # a pass that refuses the target or what comes after it
            continue
        if sites := len(trial.records[0].sites):
            found.append(gain(name, sites, base, predict(trial.result)))
    better = [one for one in found if max(one.objective, *one.steps.values()) >= LEAST]
    return sorted(better, key=lambda one: (-one.objective, -max(one.steps.values())))


def resolved(name: str, options: dict[str, Any]) -> ResolvedPass:
    """The pass ``name`` with ``options``."""
    from optkit import passes  # type: ignore[attr-defined]

    pass_class: Any = passes.load(name)
    return ResolvedPass(
        PassEntry(name=name, config=options), pass_class, pass_class.Config.model_validate(options)
    )


def place_of(candidate: ResolvedPass, passes: Sequence[ResolvedPass]) -> int:
    """The index of the first pass of ``candidate``'s stage or a later one."""
    stage: Stage = candidate.pass_class.stage
    return next((index for index, one in enumerate(passes) if one.pass_class.stage >= stage), len(passes))
