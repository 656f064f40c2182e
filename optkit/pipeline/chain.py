"""The finished steps of a run, and the result of all passes together, also after later changes.

A changed record (a pass undone, more layers in float) takes effect from the last state before the change: later passes
are applied again, earlier passes are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from optkit.checkpoint.insertion import fall_back
from optkit.errors import UserError
from optkit.evaluation.limits import FINAL_TOKENS
from optkit.graph import variants
from optkit.graph.ir import Graph
from optkit.passes.base import Plan
from optkit.passes.quantization.linear import LinearQuantization
from optkit.passes.resolve import ResolvedPass
from optkit.pipeline.apply import apply_pass
from optkit.pipeline.compile_hook import build_code
from optkit.pipeline.decision import LONG, decided_early
from optkit.pipeline.measurement import Measurement
from optkit.pipeline.records import PassRecord, RunRecord
from optkit.pipeline.runner import PassRunner
from optkit.pipeline.state import State
from optkit.pipeline.step import Step, pass_facts, whole_step


@dataclass(frozen=True)
class Chain:
    """The finished steps of a run.

    Attributes:
        steps: the capture, then a step for each pass.
        records: a record for each pass.
        last: the state after the last step.
        runner: has run the passes; measures, and keeps finished steps.
        final_tokens: of text for the quality of the whole; None for as many of ``FINAL_TOKENS`` as its bounds need.
    """

    passes: Sequence[ResolvedPass]
    steps: Sequence[Step]
    records: Sequence[PassRecord]
    last: State
    runner: PassRunner
    final_tokens: int | None

    @property
    def measurement(self) -> Measurement:
        return self.runner.measurement

    @property
    def quantizers(self) -> set[str]:
        """Names of the recipe's passes with quantized linear layers as result."""
        return {p.entry.name for p in self.passes if issubclass(p.pass_class, LinearQuantization)}

    def measure(self, records: Sequence[PassRecord]) -> tuple[Graph, RunRecord]:
        """The graph and the measurements of all passes together, as ``records`` have them."""
        start = self.first_change(records)
        base = self.base(records, start)
        if not any(record.in_effect for record in records):
            return base.graph, RunRecord(list(records), None)
        recipe, again = self.measurement.recipe, self.passes[start:]
        step = whole_step(base.step, recipe, records, self.final_tokens, again)

        def work() -> tuple[Graph, dict[str, Any]]:
            graph, passes = self.rebuilt(base, records, start)
            whole = PassRecord.planned("whole", {}, Plan())
            reference, spans = self.measurement.reference, variants.spans(graph)
            self.measurement.predict(whole, reference, graph)
            lowered = self.measurement.measure_costs(whole, reference, graph)
            long = recipe.accept.max_long_loss is not None
            if start == len(records) and not spans and self.is_measured_as_whole(long=long):
                whole.quality = self.last_in_effect.quality
            else:
                bounds = recipe.accept if self.final_tokens is None else None
                self.measurement.measure_quality(
                    whole, lowered, self.most_tokens, spans, long=long, bounds=bounds
                )
            return graph, RunRecord(passes, whole.decided("kept", "")).to_dict()

        state = self.runner.cache.resume(step, base, work, self.runner.waiting)
        return state.graph, RunRecord.from_dict(state.record)

    @property
    def most_tokens(self) -> int:
        """Tokens of text for the quality of the whole, at most."""
        return FINAL_TOKENS if self.final_tokens is None else self.final_tokens

    @property
    def last_in_effect(self) -> PassRecord:
        """The record of the last pass that changed the result; there is one."""
        return next(record for record in reversed(self.records) if record.in_effect)

    def is_measured_as_whole(self, *, long: bool) -> bool:
        """True where the quality after the last pass in effect is from the same text and documents as the whole's.

        The graph there is the whole, and the other side is the source model in both measurements. Less text will do
        where the measurement of the whole would end there.

        Args:
            long: the whole is measured on long documents, too.
        """
        quality = self.last_in_effect.quality
        windows = len(self.measurement.windows(self.measurement.allowed_tokens(self.most_tokens)))
        if not quality or (LONG in quality) != long:
            return False
        if quality["windows"] == windows:
            return True
        return self.final_tokens is None and decided_early(
            self.measurement.recipe.accept, {"": quality}, windows
        )

    def first_change(self, records: Sequence[PassRecord]) -> int:
        """The index of the first pass with another effect in ``records`` than in the chain."""
        pairs = enumerate(zip(records, self.records, strict=True))
        return next((i for i, (new, old) in pairs if new.effect != old.effect), len(records))

    def base(self, records: Sequence[PassRecord], start: int) -> State:
        """The last finished state before the change in ``records`` at index ``start``.

        For more layers in float, the state after the pass is the base; for an undone pass, the state before.
        """
        if start == len(records):
            return self.last
        step = self.steps[start + 1 if records[start].in_effect else start]
        found = self.runner.cache.load(step)
        if found is None:
            raise UserError(
                "a finished step of this run was damaged",
                where=str(self.runner.cache.root / step.key),
                fix="run again",
            )
        return found

    def rebuilt(
        self, base: State, records: Sequence[PassRecord], start: int
    ) -> tuple[Graph, list[PassRecord]]:
        """The graph of ``records``, from ``base`` on; and the records, with the new sites of later passes."""
        graph, found = base.graph, [replace(record) for record in records]
        for index in range(start, len(found)):
            record = found[index]
            if not record.in_effect:
                continue
            if index > start:
                graph = self.apply_again(graph, index, base, found)
            elif len(record.fallback) > len(self.records[index].fallback):
                record.changed = len(record.sites) - len(record.fallback)
            graph = fall_back(graph, set(record.fallback))
        return graph, found

    def apply_again(self, graph: Graph, index: int, base: State, records: Sequence[PassRecord]) -> Graph:
        """Apply pass ``index`` to ``graph``, a changed input; the sites found go into the pass's record.

        A layer with fallback in an earlier pass may be a site now.
        """
        resolved, record, graph = self.passes[index], records[index], graph.clone()
        optimization = resolved.pass_class(resolved.config)
        effects = [before.effect for before in records[:index]]
        facts = [pass_facts(earlier) for earlier in self.passes[: index + 1]]
        workspace = self.runner.cache.workspace(base.step.then({"again": facts, "after": effects}))
        context = self.measurement.context(workspace)
        plan = optimization.check(graph, context)
        result = apply_pass(optimization, graph, plan, context, self.runner.reproducer(self.last.step))
        record.sites = [site.name for site in plan.sites]
        record.changed = result.changed - len(record.fallback)
        m = self.measurement
        build_code(graph, record, m.recipe, m.target, m.progress)
        return graph
