"""The driver: captures a model, runs a recipe's passes in order, judges the whole, and writes the artifact.

Passes run in ``optkit.pipeline.runner``; ``optkit.pipeline.judge`` decides; finished steps are kept in the cache
(``optkit.pipeline.cache``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from optkit.artifact import staging
from optkit.checkpoint.locate import ModelSource, resolve
from optkit.checkpoint.text_files import notes_on_tokenizer, refuse_broken_tokenizer
from optkit.checkpoint.validate import validate_checkpoint
from optkit.evaluation.limits import FINAL_TOKENS
from optkit.evaluation.long.check import check_long
from optkit.evaluation.speed import check_workload
from optkit.evaluation.text import check_text
from optkit.graph.ir import Graph
from optkit.machine.present import present_target
from optkit.machine.target import Target
from optkit.passes.base import Progress, no_progress
from optkit.passes.resolve import Alternatives, Resolved, ResolvedPass, resolve_passes
from optkit.pipeline.alternatives import Choice, choose
from optkit.pipeline.apply import PassFailed
from optkit.pipeline.bake import check_prompts
from optkit.pipeline.cache import PassCache
from optkit.pipeline.chain import Chain
from optkit.pipeline.compile_hook import ensure_code
from optkit.pipeline.estimate import estimate, refuse_what_cannot_fit
from optkit.pipeline.measurement import Measurement
from optkit.pipeline.pass_places import pass_places, without_undone
from optkit.pipeline.records import RunRecord
from optkit.pipeline.runner import WAITING, PassRunner, has_inexact
from optkit.pipeline.state import State
from optkit.pipeline.step import capture_step, environment
from optkit.pipeline.whole import judge_whole
from optkit.recipe.load import load_recipe
from optkit.recipe.schema import Recipe

__all__ = ["PassFailed", "Pipeline", "optimize"]


@dataclass(frozen=True)
class Pipeline:
    """A run: a source model, a recipe, a target."""

    source: ModelSource
    recipe: Recipe
    target: Target
    progress: Progress
    final_tokens: int | None = None

    def run(self) -> tuple[Graph, RunRecord]:
        """Capture, run every pass, judge the whole; finished steps come from the cache."""
        resolved = resolve_passes(self.recipe)
        with PassCache(self.source.directory) as cache:
            chain, choices, places = self.run_passes(resolved, cache)
            graph, run = judge_whole(chain)
            chain.measurement.collect()
            ensure_code(graph, self.recipe, self.target, self.progress)
            cache.remove_workspaces()
        records = {label: choice.records for label, choice in choices.items()}
        places = without_undone(places, chain.records, run.passes)
        return graph, replace(
            run, alternatives=records, places=places, notes=[*self.source.notes, *graph.notes]
        )

    def run_passes(
        self, resolved: Sequence[Resolved], cache: PassCache
    ) -> tuple[Chain, dict[str, Choice], dict[str, dict[str, Any]]]:
        """The capture and every pass in order; each choice between candidates, and the places for candidates.json.

        Choices and places are by label of the recipe.
        """
        states, passes, after_inexact = [self.capture(cache)], list[ResolvedPass](), False
        directory, reference = self.source.directory, states[0].graph
        check_workload(self.recipe, reference.meta.max_model_len)
        measurement = Measurement(
            directory,
            self.recipe,
            self.target,
            self.progress,
            reference,
            spill=cache.spill,
            release=cache.release,
        )
        runner = PassRunner(measurement, cache)
        choices: dict[str, Choice] = {}
        places: dict[str, dict[str, Any]] = {}
        for part in parts(resolved):
            if isinstance(part, Alternatives):
                choice = choose(runner, part, states[-1], after_inexact=after_inexact)
                choices[part.name], places[part.name] = choice, choice.place
                chosen, added = choice.passes, choice.states
            else:
                chosen, added = part, runner.run(part, states[-1], after_inexact=after_inexact)
                if self.target.kind == "cpu":
                    places |= pass_places(self.recipe, self.target, part, states[-1], added)
            passes, states = passes + list(chosen), states + added
            after_inexact = after_inexact or has_inexact(added)
        steps, records = [state.step for state in states], [state.pass_record for state in states[1:]]
        return Chain(passes, steps, records, states[-1], runner, self.final_tokens), choices, places

    def capture(self, cache: PassCache) -> State:
        """The captured model."""
        from optkit.capture import capture_directory
        from optkit.capture.rope import depends_on_length

        served = self.recipe.runtime.max_model_len if depends_on_length(cache.source.info.config) else None

        def work() -> tuple[Graph, dict[str, Any]]:
            self.progress("capturing the model with torch.export")
            return capture_directory(
                self.source.directory, max_model_len=served, adapters=self.source.adapters
            ), {}

        waiting = partial(self.progress, WAITING)
        return cache.resume(capture_step(self.source, self.target, served), None, work, waiting)


def parts(resolved: Sequence[Resolved]) -> Iterator[list[ResolvedPass] | Alternatives]:
    """``resolved`` in order, passes in a row as a list."""
    row: list[ResolvedPass] = []
    for item in resolved:
        if isinstance(item, Alternatives):
            yield row
            yield item
            row = []
        else:
            row.append(item)
    yield row


def optimize(
    model: str,
    recipe: Recipe | str,
    out: Path,
    *,
    adapters: Sequence[Path] = (),
    force: bool = False,
    progress: Progress = no_progress,
    final_tokens: int | None = None,
) -> RunRecord:
    """Optimize ``model``, with ``adapters`` merged, by ``recipe`` into the artifact directory ``out``.

    Args:
        final_tokens: of held-out text for the quality of the whole, all of them; by default as many of
            ``FINAL_TOKENS`` as the recipe's bounds need.

    Raises:
        UserError: model, recipe or output can't be used; nothing is written.
        PassFailed: a pass broke the graph (a bug in the pass).
    """
    from optkit.capture.streamed import is_loaded_whole
    from optkit.checkpoint.source import open_source
    from optkit.pipeline.publish import write_artifact

    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    resolved = resolve_passes(recipe)
    staging.check_output(out, force=force)
    source = resolve(model, progress).with_adapters(adapters)
    info = validate_checkpoint(source.directory)
    refuse_broken_tokenizer(source.directory)
    source = replace(source, notes=(*source.notes, *notes_on_tokenizer(source.directory)))
    check_text(recipe, source.directory)
    check_long(recipe, source.directory, info.config.get("max_position_embeddings"))
    check_prompts(resolved, source.directory)
    target = present_target(recipe.target, where=f"recipe {recipe.name}")
    if target.kind == "cpu":
        copies = recipe.files.float_copies
        whole = is_loaded_whole(open_source(source.directory), source.adapters)
        most = FINAL_TOKENS if final_tokens is None else final_tokens
        found = estimate(info, resolved, target, most, float_copies=copies, loaded_whole=whole)
        progress(found.line())
        refuse_what_cannot_fit(found, target, out, resolved)
    if target.name != recipe.target:
        progress(f"the recipe is for {recipe.target}, the plan for the GPU of this machine: {target.name}")
    graph, run = Pipeline(source, recipe, target, progress, final_tokens).run()
    progress(f"writing {out}")
    write_artifact(out, graph, source, recipe, run, target, environment(), force=force)
    return run
