"""The candidates that ``optkit optimize`` would likely choose on this machine, for an artifact of another one.

The layers of each candidate, which the artifact keeps (``optkit.pipeline.candidates``), are measured here, and the
steps of the workload are predicted from them. The rule of the choice is that of ``optkit.pipeline.alternatives``, on
predictions. A pass outside ``one_of`` is a place with a single candidate. ``optkit serve`` runs the module as a process
of the lowest priority after the start, once a machine and artifact: ``python -m optkit.pipeline.choice_here ARTIFACT``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from optkit.artifact import measured_on
from optkit.artifact.manifest import CANDIDATES
from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.evaluation.kernel_times import KernelTimes
from optkit.evaluation.speed import workload_points
from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point
from optkit.machine.target import Target, get_target
from optkit.passes.base import PassContext
from optkit.passes.resolve import Alternatives, ResolvedPass, resolve_passes
from optkit.pipeline import objective
from optkit.pipeline.alternatives import DECODES_FASTER, decode_label, planned
from optkit.pipeline.candidates import CandidateEntry, Model, PlaceEntry, read_model, read_places
from optkit.pipeline.runner import run_unmeasured
from optkit.recipe.schema import Recipe

CLEARLY = (
    0.8  # of the cost of the kept candidate: predictions are up to a fifth off, closer ones name no winner
)
BEFORE = ""  # the name of the layers without a candidate
SPEED_BOUNDS = ("min_speedup", "min_decode_speedup")
HERE = ", planned for this machine"  # behind the name of a candidate with other ops than on the machine of the artifact

StepSeconds = Callable[[Graph, Point, int], float | None]  # (graph of some layers, step, layers in the whole)


@dataclass(frozen=True)
class Forecast:
    """Predicted costs of a candidate: by the objective, and of a decode step. The unit is arbitrary."""

    cost: float
    decode: float


@dataclass(frozen=True)
class PlaceChoice:
    """The choice at a place: the kept candidates and those predicted best, for prompts and for decode steps.

    ``forecasts`` are by name; the layers without a candidate have the empty name. ``is_pass`` is true for a pass
    outside ``one_of``: the only candidate has the name of the pass.
    """

    label: str
    is_pass: bool
    kept: tuple[str, str]
    best: tuple[str, str]
    forecasts: Mapping[str, Forecast]

    @property
    def gains(self) -> tuple[float, float]:
        """Predicted cost of the kept candidate over that of the best, for prompts and for decode steps."""
        (kept, decode), (best, best_decode) = self.kept, self.best
        known = self.forecasts
        return known[kept].cost / known[best].cost, known[decode].decode / known[best_decode].decode


def choices_here(
    directory: Path, recipe: Recipe, step_seconds: StepSeconds | None = None
) -> list[PlaceChoice]:
    """The choice at each place of the artifact in ``directory`` whose candidates have predictions.

    Args:
        recipe: of the artifact.
        step_seconds: by default from layers measured here, or measured before.

    Raises:
        UserError: the candidates are damaged.
    """
    places = read_places(directory)
    if recipe.objective not in objective.TIMES:
        return []
    target = get_target("cpu")
    seconds = step_seconds or KernelTimes(target, recipe).step_seconds
    known, where = passes_by_candidate(recipe), str(directory / CANDIDATES)
    found = []
    for label, place in places.items():
        before = read_model(place.before, where)
        models = {entry.name: read_model(entry, where) for entry in place.candidates}
        options = planned_here(place, before, models, known.get(label, {}), target)
        models = {BEFORE: before, **{entry.name: model for entry, model in options}}
        place = place.model_copy(update={"candidates": [entry for entry, _ in options]})
        found.append(place_choice(label, place, models, recipe, seconds))
    return [choice for choice in found if choice is not None]


def place_choice(
    label: str, place: PlaceEntry, models: Mapping[str, Model], recipe: Recipe, seconds: StepSeconds
) -> PlaceChoice | None:
    """The choice at ``place``, from ``models`` by name; None where the kept layers have no prediction."""
    forecasts = {}
    for name, model in models.items():
        steps = {p.label: seconds(model.graph, p, model.layers) for p in workload_points(recipe)}
        times = {step: time for step, time in steps.items() if time is not None}
        if len(times) == len(steps):
            cost = objective.TIMES[recipe.objective](recipe.workload, times)
            forecasts[name] = Forecast(cost, times[decode_label(times)])
    kept = place.prompts, place.decode
    if not forecasts.keys() >= {*kept}:
        return None
    is_pass = {entry.name for entry in place.candidates} <= {label, label + HERE}
    return PlaceChoice(label, is_pass, kept, best_of(forecasts, place), forecasts)


def passes_by_candidate(recipe: Recipe) -> dict[str, dict[str, Sequence[ResolvedPass]]]:
    """The passes of each candidate of each place, by label and name; none where a pass is not installed here."""
    try:
        resolved = resolve_passes(recipe)
    except UserError:
        return {}
    found: dict[str, dict[str, Sequence[ResolvedPass]]] = {}
    for item in resolved:
        if isinstance(item, Alternatives):
            found[item.name] = {planned(passes).name: passes for passes in item.candidates}
        else:
            found[item.entry.name] = {item.entry.name: [item]}
    return found


def planned_here(
    place: PlaceEntry,
    before: Model,
    models: Mapping[str, Model],
    known: Mapping[str, Sequence[ResolvedPass]],
    target: Target,
) -> list[tuple[CandidateEntry, Model]]:
    """The candidates of ``place`` with their models, as ``optkit optimize`` would plan them on ``target``.

    A pass may plan other ops on another machine: ``int8`` with ``activations: auto`` does. Such a candidate gets a name
    with ``HERE``. The kept candidates are there as made, too.

    Args:
        known: the passes of a candidate, by name.
    """
    kept, found = {place.prompts, place.decode}, []
    for entry in place.candidates:
        model, passes = models[entry.name], known.get(entry.name)
        graph = run_unmeasured(before.graph, passes, PassContext(target))[0] if passes else model.graph
        other = not calls(graph) <= calls(model.graph)
        if entry.name in kept or not other:
            found.append((entry, model))
        if other:
            renamed = entry.model_copy(update={"name": entry.name + HERE})
            found.append((renamed, Model(graph, before.layers)))
    return found


def calls(graph: Graph) -> set[tuple[str, ...]]:
    """The ops of ``graph``, each with its options in words: ``("linear_w8a16", "bfloat16")``."""
    nodes = [node for node in graph.fx.nodes if node.op == "call_function"]
    words = ((value for value in (*n.args, *n.kwargs.values()) if isinstance(value, str)) for n in nodes)
    return {(str(ops.op_name(node.target)), *found) for node, found in zip(nodes, words, strict=True)}


def best_of(forecasts: Mapping[str, Forecast], place: PlaceEntry) -> tuple[str, str]:
    """The best candidates for prompts and for decode steps; the kept ones where no other is clearly better."""
    prompts = min(forecasts, key=lambda name: forecasts[name].cost)
    if forecasts[prompts].cost > CLEARLY * forecasts[place.prompts].cost:
        prompts = place.prompts
    able = [name for name in for_decodes(place, prompts) if name in forecasts]
    decode = min(able, key=lambda name: forecasts[name].decode, default=prompts)
    if forecasts[decode].decode > DECODES_FASTER * forecasts[prompts].decode:
        decode = prompts
    kept = place.decode if place.decode in (prompts, *able) else decode
    return prompts, kept if forecasts[decode].decode > CLEARLY * forecasts[kept].decode else decode


def for_decodes(place: PlaceEntry, prompts: str) -> list[str]:
    """Names of the candidates that may run steps of few tokens in front of the candidate ``prompts``."""
    entries = {entry.name: entry for entry in place.candidates}
    if prompts not in entries or not entries[prompts].takes_second:
        return []
    used = entries[prompts].passes
    return [e.name for e in entries.values() if e.takes_few and not {*e.passes} & {*used}]


# -- in words ------------------------------------------------------------------------------------------------


def sentence(choices: list[PlaceChoice], recipe: Recipe, *, same_machine: bool = False) -> str:
    """The likely choice here, in a line.

    Args:
        same_machine: the passes were measured on such a machine, which says more than predictions.
    """
    return likely(choices, recipe, same_machine=same_machine) + unpredicted(recipe)


def likely(choices: list[PlaceChoice], recipe: Recipe, *, same_machine: bool) -> str:
    """``sentence`` by the recipe's objective alone."""
    if same_machine:
        return "the passes were measured on such a machine: optkit optimize would likely choose the same here"
    if recipe.objective not in objective.TIMES:
        return (
            f"the recipe's objective is {recipe.objective}, which does not depend on the kernels: "
            "optkit optimize would likely keep the same passes here"
        )
    if not choices:
        return "the candidates have no prediction here; optkit optimize measures again on this machine"
    changed = [clause for choice in choices for clause in changes(choice)]
    if not changed:
        names = ", ".join(map(kept_shown, choices))
        return f"optkit optimize would likely choose the same here ({names})"
    again = "make it again here: optkit optimize MODEL --recipe ARTIFACT/optkit/recipe.yaml -o NEW"
    return f"optkit optimize would likely {'; '.join(changed)}; {again}"


def unpredicted(recipe: Recipe) -> str:
    """A clause on bounds on speed, of the recipe or of a pass, which are measured by ``optkit optimize`` alone."""
    accepts = [recipe.accept, *(entry.accept for entry in recipe.entries)]
    names = [name for name in SPEED_BOUNDS if any(getattr(accept, name) is not None for accept in accepts)]
    return f" (bounds on speed are not predicted: {', '.join(names)})" if names else ""


def kept_shown(choice: PlaceChoice) -> str:
    """``layers: int8`` for a place with candidates, ``int8 kept`` or ``int8 undone`` for a pass."""
    kept = choice.kept[0]
    if choice.is_pass:
        return f"{choice.label} {'kept' if kept else 'undone'}"
    return f"{choice.label}: {shown(kept)}"


def changes(choice: PlaceChoice) -> list[str]:
    """``choose int8 for prompts (predicted 1.30x as fast as w4a8, ...)`` for each kind of step with another choice.

    Decode steps may get slower, where the candidate for prompts takes no other for few tokens. A pass is undone, kept
    or made again.
    """
    if choice.is_pass:
        return pass_changes(choice)
    rows = zip(("prompts", "decode steps"), choice.kept, choice.best, choice.gains, strict=True)
    return [
        f"choose {shown(best)} for {steps} (predicted {gain:.2f}x as fast as {shown(kept)}, which this artifact has"
        f"{', but needed by these prompts' if gain < 1 else ''})"
        for steps, kept, best, gain in rows
        if kept != best
    ]


def pass_changes(choice: PlaceChoice) -> list[str]:
    """``undo int8 (predicted 1.30x as fast by the recipe's objective, ...)``; nothing for the same choice."""
    (kept, _), (best, _), (gain, decode) = choice.kept, choice.best, choice.gains
    if kept == best:
        return []
    verb = "undo" if not best else "plan other operators for" if best.endswith(HERE) else "keep"
    return [
        f"{verb} {choice.label} (predicted {gain:.2f}x as fast as this artifact by the recipe's objective, "
        f"{decode:.2f}x in decode steps)"
    ]


def shown(name: str) -> str:
    return name or "no candidate"


def predict_here(directory: Path, step_seconds: StepSeconds | None = None) -> tuple[list[PlaceChoice], str]:
    """The choices for the artifact in ``directory``, and the sentence about them, which is kept for later notices.

    Raises:
        UserError: recipe or candidates are damaged.
    """
    recipe = Artifact.open(directory, verify=False).recipe
    choices = choices_here(directory, recipe, step_seconds)
    made = measured_on.made_on(directory)
    same = made is not None and measured_on.is_this_machine(made)
    text = sentence(choices, recipe, same_machine=same)
    measured_on.keep_sentence(directory, text)
    return choices, text


def main(directory: str) -> int:
    """Predict, and print the sentence; the exit code.

    Nothing is printed where nothing is undecided, as after another server's prediction. Where memory runs out, the
    system ends this process first.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", "utf-8")
    path = Path(directory)
    if not measured_on.is_undecided(path):
        return 0
    try:
        recipe = Artifact.open(path, verify=False).recipe
        times = KernelTimes(get_target("cpu"), recipe, keep=False)
        _, text = predict_here(path, times.step_seconds)
    except UserError as error:
        text = f"the choice for this machine can't be predicted: {error}"
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
