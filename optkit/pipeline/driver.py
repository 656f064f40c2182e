"""The driver: runs a recipe's passes over a captured model, proves each, and writes the artifact.

For each pass, in the recipe's order: check, apply, verify (graph and numerics), predict (time before and after),
measure (paired, through the runtime), keep or roll back by the recipe's bounds and objective
(``optkit.pipeline.judge``), record. A finished step is kept in the cache (``optkit.pipeline.cache``). A pass that
breaks the graph is a bug: the driver writes a reproducer and names the pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optkit.artifact import staging
from optkit.checkpoint.locate import ModelSource, resolve
from optkit.checkpoint.validate import validate_checkpoint
from optkit.graph.ir import Graph
from optkit.machine.paths import cache_dir
from optkit.machine.present import present_target
from optkit.machine.target import Target
from optkit.passes.base import PassContext, Progress, no_progress
from optkit.passes.resolve import ResolvedPass, resolve_passes
from optkit.pipeline.apply import PassFailed, Reproduce, apply_pass
from optkit.pipeline.cache import PassCache
from optkit.pipeline.chain import Chain
from optkit.pipeline.compile_hook import ensure_code
from optkit.pipeline.judge import PassJudge, judge_whole
from optkit.pipeline.measurement import Measurement
from optkit.pipeline.records import PassRecord, RunRecord
from optkit.pipeline.state import State
from optkit.pipeline.step import Step, capture_step, environment, pass_step
from optkit.recipe.load import load_recipe
from optkit.recipe.schema import Recipe

__all__ = ["PassFailed", "Pipeline", "optimize", "run_pass"]

FINAL_TOKENS = 20480  # of text that the quality of the whole is measured on

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
    record = PassRecord.planned(optimization.name, resolved.config.model_dump(), plan)
    if not plan.sites:
        return graph, record.decided("skipped", "no site to change")
    context.progress(f"{optimization.name}: rewriting {len(plan.sites)} sites")
    result = apply_pass(optimization, candidate, plan, context, reproduce)
    record.changed, record.stats, record.exact = result.changed, result.stats, optimization.exact
    return judge(graph, candidate, record), record


@dataclass(frozen=True)
class Pipeline:
    """A run: a source model, a recipe, a target."""

    source: ModelSource
    recipe: Recipe
    target: Target
    progress: Progress
    final_tokens: int = FINAL_TOKENS

    def run(self) -> tuple[Graph, RunRecord]:
        """Capture, run every pass, judge the whole; finished steps come from the cache."""
        passes = resolve_passes(self.recipe)
        with PassCache(self.source.directory) as cache:
            graph, run = judge_whole(self.run_passes(passes, cache))
            ensure_code(graph, self.recipe, self.target, self.progress)
            cache.remove_workspaces()
        return graph, run

    def run_passes(self, passes: Sequence[ResolvedPass], cache: PassCache) -> Chain:
        """Run the capture and every pass in order."""
        state = self.capture(cache)
        directory = self.source.directory
        measurement = Measurement(directory, self.recipe, self.target, self.progress, state.graph)
        steps, records = [state.step], list[PassRecord]()
        for resolved in passes:
            after_inexact = any(record.in_effect and not record.exact for record in records)
            judge = PassJudge(measurement, resolved.entry.accept, resolved.entry.keep, after_inexact)
            state = self.advance(state, resolved, judge, cache)
            steps.append(state.step)
            records.append(PassRecord.from_dict(state.record))
            self.progress(f"{resolved.entry.name}: {records[-1].decision}, {records[-1].reason}")
        reproduce = self.reproducer(state.step)
        return Chain(
            passes, steps, records, state, cache, measurement, self.final_tokens, reproduce, self.waiting
        )

    def capture(self, cache: PassCache) -> State:
        """The captured model."""
        from optkit.capture import capture_directory

        def work() -> tuple[Graph, dict[str, Any]]:
            self.progress("capturing the model with torch.export")
            return capture_directory(self.source.directory), {}

        return cache.resume(capture_step(self.source, self.target), None, work, self.waiting)

    def advance(self, state: State, resolved: ResolvedPass, judge: PassJudge, cache: PassCache) -> State:
        """The state after the pass ``resolved`` on ``state``."""
        step = pass_step(state.step, resolved, self.recipe)
        workspace = cache.workspace(step)
        context = judge.measurement.context(workspace)

        def work() -> tuple[Graph, dict[str, Any]]:
            graph, record = run_pass(state.graph, resolved, context, judge, self.reproducer(step))
            return graph, record.to_dict()

        after = cache.resume(step, state, work, self.waiting)
        cache.remove(workspace)
        return after

    def waiting(self) -> None:
        self.progress("waiting for another run, which does this step")

    def reproducer(self, step: Step) -> Reproduce:
        """A function for ``apply_pass``: writes graph, recipe and versions, and returns the directory."""

        def write(name: str, graph_text: str) -> Path:
            place = cache_dir("reproducers") / f"{name}-{step.key[:12]}"
            place.mkdir(exist_ok=True)
            (place / "graph.json").write_text(graph_text, "utf-8")
            (place / "recipe.yaml").write_text(self.recipe.to_yaml(), "utf-8")
            (place / "versions.json").write_text(json.dumps(environment(), indent=1), "utf-8")
            return place

        return write


def optimize(
    model: str,
    recipe: Recipe | str,
    out: Path,
    *,
    force: bool = False,
    progress: Progress = no_progress,
    final_tokens: int = FINAL_TOKENS,
) -> RunRecord:
    """Optimize ``model`` by ``recipe`` into the artifact directory ``out``.

    Raises:
        UserError: model, recipe or output can't be used; nothing is written.
        PassFailed: a pass broke the graph (a bug in the pass).
    """
    from optkit.pipeline.publish import write_artifact

    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    resolve_passes(recipe)
    staging.check_output(out, force=force)
    source = resolve(model, progress)
    validate_checkpoint(source.directory)
    target = present_target(recipe.target, where=f"recipe {recipe.name}")
    if target.name != recipe.target:
        progress(f"the recipe is for {recipe.target}, the plan for the GPU of this machine: {target.name}")
    graph, run = Pipeline(source, recipe, target, progress, final_tokens).run()
    progress(f"writing {out}")
    write_artifact(out, graph, source, recipe, run, target, environment(), force=force)
    return run
