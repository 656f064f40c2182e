"""Runs passes: check, apply, verify, predict, measure, keep or roll back, record; finished steps come from the cache.

Exact passes in a row are measured together: a fusion may slow down float layers and speed up the layers of a later
quantizer, and a measurement for each would take most of a run's time. So are the passes of a candidate, which is chosen
as a whole. A pass that breaks the graph is a bug: the runner
writes a reproducer and names the pass.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optkit.graph.ir import Graph
from optkit.machine.paths import cache_dir
from optkit.passes.base import PassContext, Plan, Stage
from optkit.passes.resolve import ResolvedPass
from optkit.pipeline.apply import Reproduce, apply_pass
from optkit.pipeline.cache import PassCache
from optkit.pipeline.judge import PassJudge
from optkit.pipeline.measurement import Measurement
from optkit.pipeline.records import PassRecord
from optkit.pipeline.state import State
from optkit.pipeline.step import Step, comparison_step, environment, pass_step
from optkit.recipe.schema import Accept

WAITING = "waiting for another run, which does this step"

Judge = Callable[[Graph, Graph, PassRecord], Graph]  # (before, candidate, record) -> the graph to go on with


def run_pass(
    graph: Graph,
    resolved: ResolvedPass,
    context: PassContext,
    judge: Judge,
    reproduce: Reproduce | None = None,
) -> tuple[Graph, PassRecord]:
    """Run a pass: check, apply, verify, then keep or roll back by ``judge``; ``graph`` itself is not changed."""
    optimization = resolved.pass_class(resolved.config)
    candidate = graph.clone()
    plan = optimization.check(candidate, context)
    record = PassRecord.planned(resolved.entry.name, resolved.config.model_dump(), plan)
    if not plan.sites:
        return graph, record.decided("skipped", "no site to change")
    context.progress(f"{record.name}: rewriting {len(plan.sites)} sites")
    result = apply_pass(optimization, candidate, plan, context, reproduce)
    record.changed, record.stats, record.exact = result.changed, result.stats, optimization.exact
    return judge(graph, candidate, record), record


def keep_unmeasured(before: Graph, candidate: Graph, record: PassRecord) -> Graph:
    """The candidate of a pass that is measured together with later passes."""
    record.decided("kept", "not measured alone")
    return candidate


def run_unmeasured(
    graph: Graph,
    passes: Sequence[ResolvedPass],
    context: PassContext,
    reproduce: Reproduce | None = None,
) -> tuple[Graph, list[PassRecord]]:
    """The graph after all of ``passes``, and their records; nothing is measured, shapes without values are enough."""
    records = []
    for resolved in passes:
        graph, record = run_pass(graph, resolved, context, keep_unmeasured, reproduce)
        records.append(record)
    return graph, records


@dataclass(frozen=True)
class PassRunner:
    """Runs passes with the measurements, the cache and the recipe of a run."""

    measurement: Measurement
    cache: PassCache

    def run(
        self,
        passes: Sequence[ResolvedPass],
        before: State,
        *,
        after_inexact: bool,
        judge: type[PassJudge] = PassJudge,
    ) -> list[State]:
        """The state after each of ``passes``, judged by a ``judge``.

        Args:
            after_inexact: True where an earlier pass changed values.
        """
        states: list[State] = []
        for group in exact_runs(passes):
            judges = [judge(self.measurement, r.entry.accept, r.entry.keep, after_inexact) for r in group]
            added = self.run_group(group, (states or [before])[-1], judges)
            after_inexact = after_inexact or has_inexact(added)
            states += added
        return states

    def run_group(
        self, group: Sequence[ResolvedPass], before: State, judges: Sequence[PassJudge]
    ) -> list[State]:
        """The state after each pass of ``group``.

        Several passes are measured together, after the last. Where all together miss a bound, each pass is measured
        alone, so that the records name the pass at fault.
        """
        states = self.run_together(group, before, judges[-1]) if len(group) > 1 else None
        return states or self.run_each(group, before, judges)

    def run_together(
        self, passes: Sequence[ResolvedPass], before: State, judge: PassJudge
    ) -> list[State] | None:
        """The state after each of ``passes``, judged after the last; None where all together miss a bound."""
        states = self.run_each(passes, before, [None] * len(passes))
        purpose = f"{type(judge).__name__}, after inexact passes: {judge.after_inexact}"
        together = self.measured(before, states, judge, purpose)
        if together is None:
            return states
        if together.in_effect:
            return with_evidence(states, together)
        self.progress(f"{together.name}: {together.reason}; measuring each pass alone")
        return None

    def run_each(
        self, group: Sequence[ResolvedPass], state: State, judges: Sequence[PassJudge | None]
    ) -> list[State]:
        """The state after each pass of ``group``; a pass without a judge is kept unmeasured."""
        states = []
        for resolved, judge in zip(group, judges, strict=True):
            judge = judge if resolved.pass_class.measured else None
            state = self.run_one(resolved, state, judge)
            states.append(state)
            if judge is not None or state.record["decision"] == "skipped":
                self.progress(f"{resolved.entry.name}: {state.record['decision']}, {state.record['reason']}")
        return states

    def run_one(self, resolved: ResolvedPass, state: State, judge: PassJudge | None) -> State:
        """The state after the pass ``resolved`` on ``state``."""
        judged = type(judge).__name__ if judge is not None else ""
        step = pass_step(state.step, resolved, self.measurement.recipe, state.effect, judged)
        workspace = self.cache.workspace(step)
        context = self.measurement.context(workspace)

        def work() -> tuple[Graph, dict[str, Any]]:
            self.measurement.collect()
            graph, record = run_pass(
                state.graph, resolved, context, judge or keep_unmeasured, self.reproducer(step)
            )
            return graph, record.to_dict()

        after = self.cache.resume(step, state, work, self.waiting)
        self.cache.remove(workspace)
        return after

    def measured(
        self, before: State, states: Sequence[State], judge: Judge, purpose: str, name: str = ""
    ) -> PassRecord | None:
        """The record of all passes of ``states`` as of a single pass on ``before``; None where nothing changed.

        Args:
            judge: measures the graphs, and writes into the record.
            purpose: names the kind of measurement in the key of the cache.
            name: of the record; by default the names of the passes in effect.
        """
        records = [state.pass_record for state in states]
        names = [record.name for record in records if record.in_effect]
        if not names:
            return None

        def work() -> tuple[Graph, dict[str, Any]]:
            record = PassRecord.planned(name or ", ".join(names), {}, Plan())
            record.exact = all(each.exact for each in records if each.in_effect)
            judge(before.graph, states[-1].graph, record)
            return states[-1].graph, record.to_dict()

        effects = [state.effect for state in (before, *states)]
        step = comparison_step(states[-1].step, before.step, effects, purpose)
        state = self.cache.resume(step, states[-1], work, self.waiting)
        return state.pass_record

    def progress(self, text: str) -> None:
        self.measurement.progress(text)

    def waiting(self) -> None:
        self.progress(WAITING)

    def reproducer(self, step: Step) -> Reproduce:
        """A function for ``apply_pass``: writes graph, recipe and versions, and returns the directory."""

        def write(name: str, graph_text: str) -> Path:
            place = cache_dir("reproducers") / f"{name}-{step.key[:12]}"
            place.mkdir(exist_ok=True)
            (place / "graph.json").write_text(graph_text, "utf-8")
            (place / "recipe.yaml").write_text(self.measurement.recipe.to_yaml(), "utf-8")
            (place / "versions.json").write_text(json.dumps(environment(), indent=1), "utf-8")
            return place

        return write


def has_inexact(states: Sequence[State]) -> bool:
    """True where a pass of ``states`` changed values."""
    return any(record.in_effect and not record.exact for record in (state.pass_record for state in states))


def with_evidence(states: Sequence[State], together: PassRecord) -> list[State]:
    """``states`` with the evidence of ``together`` in the last record in effect; the others name that record."""
    records = [state.pass_record for state in states]
    *others, last = [record for record in records if record.in_effect]
    last.take_evidence(together)
    last.decided(together.decision, together.reason)
    if others:
        last.reason += f"; together with {', '.join(record.name for record in others)}"
    for record in others:
        record.decided("kept", f"{'exact, ' if record.exact else ''}measured together with {last.name}")
    return [replace(state, record=record.to_dict()) for state, record in zip(states, records, strict=True)]


def exact_runs(passes: Sequence[ResolvedPass]) -> list[list[ResolvedPass]]:
    """``passes`` in order, with exact passes in a row as a group; every other pass is a group of its own.

    A pass with ``accept`` or ``keep`` of its own is measured alone, and ``compile`` too.
    """
    groups: list[list[ResolvedPass]] = []
    for key, members in itertools.groupby(passes, joins_others):
        found = list(members)
        groups += [found] if key else [[member] for member in found]
    return groups


def joins_others(resolved: ResolvedPass) -> bool:
    """True for a pass that is measured together with exact passes around."""
    return resolved.pass_class.exact and without_rules(resolved)


def without_rules(resolved: ResolvedPass) -> bool:
    """True for a pass without ``accept`` or ``keep`` of its own, before ``compile``."""
    own = resolved.entry.accept != Accept() or resolved.entry.keep != "unless_worse"
    return resolved.pass_class.stage < Stage.COMPILE and not own
