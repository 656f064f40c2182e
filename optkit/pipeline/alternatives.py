"""The choice between candidates for a place of the pipeline (``one_of`` in a recipe).

Every candidate is run and measured on the same graph. Of the candidates within the bounds of quality, the candidate
with the lowest cost by the recipe's objective is chosen; where a measurement of both side by side shows no difference,
the candidate closer to the source model. Candidates are tried in the order of their predicted cost. A candidate with a
hopeless prediction is skipped.

Steps of few tokens may run in another candidate than prompts: where a quantizer decodes faster than the choice, both
are kept as variants by the number of tokens (``optkit.graph.variants``), over the same KV cache.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any

from optkit.evaluation.speed import workload_points
from optkit.graph.ir import Graph, Weight
from optkit.machine.target import Target
from optkit.passes.base import PassContext, Stage
from optkit.passes.resolve import Alternatives, ResolvedPass
from optkit.pipeline import objective
from optkit.pipeline.apply import Reproduce
from optkit.pipeline.candidates import model_entry
from optkit.pipeline.judge import PassJudge
from optkit.pipeline.measurement import predict
from optkit.pipeline.records import PassRecord
from optkit.pipeline.runner import PassRunner, run_unmeasured, without_rules
from optkit.pipeline.state import State
from optkit.recipe.schema import Accept, Recipe

HOPELESS = 1.6  # times the best measured cost; predictions were never so wrong
FEW_TOKENS, MOST_FEW = 4, 64  # decode steps of up to so many sequences run in the variant for few tokens
DECODES_FASTER = 0.9  # of the decode time of the choice, before a second variant is worth its memory
CHOSEN, NOT_CHOSEN, SKIPPED = "chosen", "not chosen", "skipped"


@dataclass
class Trial:
    """A candidate, with the states after its passes and its evidence; without states if not tried.

    Attributes:
        planned: the graph that the predictions are for, shapes without values.
        few: the candidate that runs steps of few tokens, where another runs them.
    """

    passes: list[ResolvedPass]
    record: PassRecord
    states: list[State] = field(default_factory=list)
    planned: Graph | None = None
    few: Trial | None = None

    @property
    def eligible(self) -> bool:
        """True for a candidate with a pass in effect."""
        return any(state.pass_record.in_effect for state in self.states)

    def cost(self) -> float:
        """Measured cost by the objective, over the cost without the candidate."""
        return float(self.record.objective["ratio"])

    def decode(self) -> float:
        """Measured time of a decode step, over the time without the candidate."""
        return 1 / self.record.speedup(decode_label(self.record.measured))

    def divergence(self) -> tuple[bool, float]:
        """An order by divergence, NaN last."""
        value = float(self.record.quality["kl_mean"]["value"])
        return isnan(value), value


@dataclass(frozen=True)
class Choice:
    """The chosen passes with their states, none where no candidate pays; and the record of every candidate.

    ``place`` is the ``PlaceEntry`` for candidates.json, as JSON data.
    """

    passes: list[ResolvedPass]
    states: list[State]
    records: list[PassRecord]
    place: dict[str, Any]


class CandidateJudge(PassJudge):
    """A judge of quality alone: the objective decides later, between the candidates."""

    def judges_speed(self, record: PassRecord) -> bool:
        return False

    def decides_by_speed(self, record: PassRecord) -> bool:
        return True

    def remark(self, record: PassRecord) -> str:
        return ""


class JointJudge(CandidateJudge):
    """A judge of all passes of a candidate together. No layers fall back to float: then each pass is judged alone."""

    def fall_back(self, before: Graph, candidate: Graph, record: PassRecord, sites: Collection[str]) -> Graph:
        return before


def choose(runner: PassRunner, alternatives: Alternatives, before: State, *, after_inexact: bool) -> Choice:
    """Run the candidates of ``alternatives`` on ``before`` and choose."""
    recipe, target = runner.measurement.recipe, runner.measurement.target
    trials = predicted_trials(recipe, target, alternatives, before.graph, runner.reproducer(before.step))
    for trial in trials:
        if trial.record.decision:
            continue
        reason = hopeless(recipe, trial, trials)
        if reason:
            trial.record.decided(SKIPPED, reason)
            runner.progress(f"{trial.record.name}: {reason}")
        else:
            run(runner, trial, before, after_inexact=after_inexact)
    chosen = prompts = select(runner, [trial for trial in trials if trial.eligible])
    if chosen is not None and (fast := for_few_tokens(runner, chosen, trials)):
        run(runner, fast, before, after_inexact=after_inexact)
        trials.append(fast)
        chosen = better_decode(runner, chosen, fast)
    explain_choice(trials, chosen)
    records = [trial.record for trial in trials]
    runner.progress(f"{alternatives.name}: {chosen.record.name if chosen else 'no candidate pays'}")
    place = place_data(recipe, without_values(before.graph), trials, prompts, chosen)
    return Choice(*((chosen.passes, chosen.states) if chosen else ([], [])), records, place)


def place_data(
    recipe: Recipe, before: Graph, trials: Sequence[Trial], prompts: Trial | None, chosen: Trial | None
) -> dict[str, Any]:
    """The ``PlaceEntry`` of a place; without the candidates that missed a bound.

    Args:
        prompts: the candidate for steps of many tokens.
        chosen: ``prompts``, or the candidate of two variants.
    """
    decode = (chosen.few or chosen) if chosen else None
    kept = [t for t in trials if t.planned and (t.eligible or t.record.decision == SKIPPED)]
    entries = [
        {"name": t.record.name, **rules(t), **model_entry(t.planned, recipe)} for t in kept if t.planned
    ]
    names = {
        "prompts": prompts.record.name if prompts else "",
        "decode": decode.record.name if decode else "",
    }
    return {**names, "before": model_entry(before, recipe), "candidates": entries}


# -- a candidate -------------------------------------------------------------------------------------------


def planned(passes: Sequence[ResolvedPass]) -> PassRecord:
    """An empty record, named by the passes and options: ``smoothquant, int8 group_size=64``."""
    options = {resolved.entry.name: resolved.config.model_dump() for resolved in passes}
    return PassRecord(", ".join(map(described, passes)), options, [], [])


def described(resolved: ResolvedPass) -> str:
    """The pass with the options of the recipe."""
    options = (f"{key}={value}" for key, value in resolved.entry.config.items())
    return " ".join([resolved.entry.name, *options])


def run(runner: PassRunner, trial: Trial, before: State, *, after_inexact: bool) -> None:
    """Run the passes of ``trial`` on ``before``; the evidence goes into its record."""
    states = None
    if measured_together(trial.passes):
        judge = JointJudge(runner.measurement, Accept(), "unless_worse", after_inexact)
        states = runner.run_together(trial.passes, before, judge)
    trial.states = states or runner.run(
        trial.passes, before, after_inexact=after_inexact, judge=CandidateJudge
    )
    records = [state.pass_record for state in trial.states]
    out = "; ".join(f"{r.name} {r.decision}: {r.reason}" for r in records if not r.in_effect)
    effective = [record for record in records if record.in_effect]
    if not effective:
        trial.record.decided(NOT_CHOSEN, out)
        return
    evidence = effective[-1]
    if sum(bool(record.measured) for record in effective) > 1:
        quality = evidence.quality
        evidence = compared(runner, before, trial.states, trial.record.name)
        evidence.quality = quality
        if variants := {steps: quality for r in effective for steps, quality in r.variants.items()}:
            evidence.judged(variants)
    trial.record.take_evidence(evidence)
    trial.record.reason = out


def measured_together(passes: Sequence[ResolvedPass]) -> bool:
    """True for several passes without rules or variants of their own: a measurement of all has the evidence."""
    variants = any(getattr(resolved.config, "max_tokens", None) for resolved in passes)
    return len(passes) > 1 and not variants and all(map(without_rules, passes))


def compared(runner: PassRunner, before: State, states: Sequence[State], name: str) -> PassRecord:
    """Speed, size and objective of the last of ``states`` against ``before``."""

    def measure(old: Graph, new: Graph, record: PassRecord) -> Graph:
        runner.measurement.predict(record, old, new)
        runner.measurement.measure_costs(record, old, new)
        record.decided("kept", "")
        return new

    found = runner.measured(before, states, measure, f"costs of {name}", name)
    assert found is not None  # a pass is in effect
    return found


# -- predictions -------------------------------------------------------------------------------------------


def predicted_trials(
    recipe: Recipe,
    target: Target,
    alternatives: Alternatives,
    before: Graph,
    reproduce: Reproduce | None = None,
) -> list[Trial]:
    """A trial for each candidate with predicted times, the least predicted cost first, without a prediction last.

    Predictions are made from shapes: no weight is quantized. A candidate with nothing to change here is skipped; a
    single candidate is left without a prediction, which would decide nothing.
    """
    shapes, context, trials = without_values(before), PassContext(target), []
    for passes in alternatives.candidates:
        trial = Trial(passes, planned(passes))
        graph, records = run_unmeasured(shapes, passes, context, reproduce)
        if any(record.in_effect for record in records):
            trial.planned = graph
        else:
            reasons = (skip["reason"] for record in records for skip in record.skips)
            trial.record.decided(SKIPPED, next(reasons, "no site to change"))
        trials.append(trial)
    possible = [(trial, trial.planned) for trial in trials if trial.planned]
    for trial, graph in possible if len(possible) > 1 else ():
        trial.record.predicted = predict(shapes, graph, recipe, target)
    return sorted(trials, key=lambda trial: (bool(trial.record.decision), predicted_cost(recipe, trial)))


def without_values(graph: Graph) -> Graph:
    """A clone of ``graph`` with shapes for weights."""
    clone = graph.clone()
    clone.weights = {name: Weight(weight.on_meta(), weight.origin) for name, weight in clone.weights.items()}
    return clone


def predicted_cost(recipe: Recipe, trial: Trial) -> float:
    """Predicted cost by the objective, over the cost without the candidate; by ``request`` for ``memory``.

    Infinite where a step has no prediction.
    """
    if not all(point.label in trial.record.predicted for point in workload_points(recipe)):
        return inf
    cost = objective.TIMES.get(recipe.objective, objective.request)
    before, after = (
        {label: times[side] for label, times in trial.record.predicted.items()} for side in (0, 1)
    )
    return cost(recipe.workload, after) / cost(recipe.workload, before)


def predicted_decode(trial: Trial) -> float:
    """Predicted time of a decode step, over the time without the candidate."""
    before, after = trial.record.predicted[decode_label(trial.record.predicted)]
    return after / before


def decode_label(times: Mapping[str, object]) -> str:
    """The label of the decode step among times by workload point."""
    (label,) = (name for name in times if not name.startswith("prefill"))
    return label


def hopeless(recipe: Recipe, trial: Trial, trials: Sequence[Trial]) -> str:
    """The reason to skip ``trial``: a predicted cost far above the measured best.

    A candidate that could be the variant for few tokens is skipped only where decode steps are far above the best, too.
    """
    measured = [other for other in trials if other.eligible]
    if not measured or recipe.objective == "memory":
        return ""
    cost = predicted_cost(recipe, trial)
    if cost == inf:
        return ""
    decode = predicted_decode(trial)
    best, best_decode = min(map(Trial.cost, measured)), min(map(Trial.decode, measured))
    if cost <= HOPELESS * best or (for_few(trial) and decode <= HOPELESS * best_decode):
        return ""
    return f"predicted cost {cost:.2f}x of before, measured {best:.2f}x with another candidate"


# -- the choice --------------------------------------------------------------------------------------------


def select(runner: PassRunner, trials: Sequence[Trial]) -> Trial | None:
    """The trial of least cost; of trials that no measurement separates from it, the closest to the source model.

    None where the least cost is a loss.
    """
    if not trials:
        return None
    best = min(trials, key=Trial.cost)
    if best.record.objective["worse"]:
        return None
    for trial in sorted(trials, key=Trial.divergence):
        if trial is best:
            break
        near = trial.record.objective["low"] <= best.record.objective["high"]
        if near and not compared(runner, best.states[-1], trial.states, trial.record.name).objective["worse"]:
            return trial
    return best


def for_few_tokens(runner: PassRunner, chosen: Trial, trials: Sequence[Trial]) -> Trial | None:
    """A candidate of two variants: the fastest quantizer at decode for few tokens, and ``chosen`` for many.

    None where ``chosen`` also changes float layers: the quantizer for few tokens needs the layers of before.
    """
    if not takes_second(chosen):
        return None
    names = {resolved.entry.name for resolved in chosen.passes}
    single = [
        trial
        for trial in trials
        if trial.eligible and for_few(trial)
        and trial.passes[0].entry.name not in names
    ]  # fmt: skip
    fast = min(single, key=Trial.decode, default=None)
    if fast is None or runner.measurement.recipe.objective == "memory":
        return None
    if fast.decode() > DECODES_FASTER * chosen.decode():
        return None
    limit = max(FEW_TOKENS, runner.measurement.recipe.workload.batch)
    if limit > MOST_FEW:
        return None
    passes = [limited(fast.passes[0], limit), *chosen.passes]
    return Trial(passes, planned(passes), few=fast)


def rules(trial: Trial) -> dict[str, Any]:
    """The facts of a ``CandidateEntry`` that decide on a second variant, as JSON data."""
    names = [resolved.entry.name for resolved in trial.passes]
    return {"passes": names, "takes_few": for_few(trial), "takes_second": takes_second(trial)}


def for_few(trial: Trial) -> bool:
    """True for a candidate that can be limited to steps of few tokens, in front of another."""
    return len(trial.passes) == 1 and takes_few(trial.passes[0])


def takes_second(trial: Trial) -> bool:
    """True for a candidate that changes no float layers: a quantizer for few tokens can stand in front of it."""
    return all(resolved.pass_class.stage == Stage.QUANTIZE for resolved in trial.passes)


def takes_few(resolved: ResolvedPass) -> bool:
    """True for a quantizer of all steps that can be limited to steps of few tokens."""
    return getattr(resolved.config, "max_tokens", 0) is None


def limited(resolved: ResolvedPass, tokens: int) -> ResolvedPass:
    """The quantizer ``resolved`` for steps of up to ``tokens`` tokens."""
    more: dict[str, Any] = {"max_tokens": tokens}
    entry = resolved.entry.model_copy(update={"config": resolved.entry.config | more})
    return resolved._replace(entry=entry, config=resolved.config.model_copy(update=more))


def better_decode(runner: PassRunner, chosen: Trial, fast: Trial) -> Trial:
    """``fast`` where it decodes faster than ``chosen`` and is not worse by the objective, else ``chosen``."""
    if not fast.eligible:
        return chosen
    costs = compared(runner, chosen.states[-1], fast.states, fast.record.name)
    return chosen if costs.objective["worse"] or fast.decode() > DECODES_FASTER * chosen.decode() else fast


def explain_choice(trials: Sequence[Trial], chosen: Trial | None) -> None:
    """Write decision and reason into the records of all trials without a decision."""
    for trial in trials:
        if trial.record.decision:
            continue
        numbers = (
            f"{trial.record.objective['name']} {trial.cost():.2f}x of before, decode {trial.decode():.2f}x"
        )
        numbers += f", KL {trial.divergence()[1]:.2g}"
        reason = "; ".join(filter(None, [numbers, trial.record.reason]))
        trial.record.decided(CHOSEN if trial is chosen else NOT_CHOSEN, reason)
