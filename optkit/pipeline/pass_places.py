"""Passes of a recipe as places with a single candidate, for candidates.json.

``optkit optimize`` keeps an inexact pass where the recipe's objective does not get worse, which depends on the machine.
So each such pass is a place (``optkit.pipeline.candidates``): the graph before, and the graph after the pass. Exact
passes are judged with the whole (``optkit.pipeline.judge``) and are no places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optkit.machine.target import Target
from optkit.passes.base import PassContext, Stage
from optkit.passes.resolve import ResolvedPass
from optkit.pipeline.alternatives import SKIPPED, Trial, place_data, without_values
from optkit.pipeline.records import PassRecord
from optkit.pipeline.runner import run_unmeasured
from optkit.pipeline.state import State
from optkit.recipe.schema import Recipe


def pass_places(
    recipe: Recipe, target: Target, passes: Sequence[ResolvedPass], before: State, states: Sequence[State]
) -> dict[str, dict[str, Any]]:
    """The ``PlaceEntry`` of each of ``passes`` that is kept or undone by speed, as JSON data by name.

    Args:
        before: the state before the first pass; ``states``: the states after each pass.
    """
    places = {}
    for resolved, previous, state in zip(passes, [before, *states], states, strict=False):
        record = state.pass_record
        if is_choice(resolved, record):
            graph = without_values(previous.graph)
            if record.in_effect:
                after = without_values(state.graph)
            else:
                after, _ = run_unmeasured(graph, [resolved], PassContext(target))
                record.decision = SKIPPED  # by speed: the quality was not measured
            trial = Trial([resolved], record, [state], after)
            kept = trial if record.in_effect else None
            places[record.name] = place_data(recipe, graph, [trial], kept, kept)
    return places


def is_choice(resolved: ResolvedPass, record: PassRecord) -> bool:
    """True for an inexact pass that the measured objective keeps or undoes; ``keep: always`` leaves no choice."""
    measured = resolved.pass_class.measured and resolved.pass_class.stage < Stage.COMPILE
    judged = measured and not record.exact and resolved.entry.keep != "always"
    return judged and (record.in_effect or bool(record.objective.get("worse") and not record.quality))


def without_undone(
    places: Mapping[str, dict[str, Any]], before: Sequence[PassRecord], after: Sequence[PassRecord]
) -> dict[str, dict[str, Any]]:
    """``places`` without the passes that the judgement of the whole undid; other machines get no prediction for these.

    Args:
        before: the records of the passes, each judged alone; ``after``: the records of the whole.
    """
    pairs = zip(before, after, strict=True)
    undone = {new.name for old, new in pairs if old.in_effect and not new.in_effect}
    return {label: place for label, place in places.items() if label not in undone}
