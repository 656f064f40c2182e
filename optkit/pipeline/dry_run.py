"""The plan of a recipe without the work: the sites of each pass, and predicted times.

The model is built on the meta device: no weight is read, a config is enough, and a model for an absent GPU can be
planned. Passes run on that graph in order, as they would in a run; only measurements and decisions are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from optkit.checkpoint.locate import resolve
from optkit.checkpoint.safetensors_header import TensorInfo
from optkit.checkpoint.text_files import notes_on_tokenizer, refuse_broken_tokenizer
from optkit.checkpoint.validate import validate_checkpoint
from optkit.errors import UserError
from optkit.evaluation.limits import FINAL_TOKENS
from optkit.evaluation.speed import check_workload, workload_points
from optkit.graph.ir import Graph
from optkit.machine.present import planning_target
from optkit.machine.target import Target
from optkit.passes.base import PassContext, no_progress
from optkit.passes.resolve import Alternatives, Resolved, ResolvedPass, resolve_passes
from optkit.pipeline.alternatives import predicted_trials
from optkit.pipeline.estimate import estimate, refuse_what_cannot_fit
from optkit.pipeline.measurement import predict
from optkit.pipeline.runner import keep_unmeasured, run_pass
from optkit.recipe.schema import Recipe


def estimated(
    directory: Path, graph: Graph, resolved: Sequence[Resolved], target: Target, *, float_copies: bool
) -> dict[str, Any] | None:
    """Seconds and bytes of a run, with a line of text, and the refusal of a run that cannot fit this machine.

    Without weights the sizes are those of the captured ``graph``. None for GPUs.
    """
    info = validate_checkpoint(directory, weights=False)
    if target.kind != "cpu":
        return None
    if not info.tensors:
        info = replace(info, tensors=tensors_by_config(graph))
    found = estimate(info, resolved, target, FINAL_TOKENS, float_copies=float_copies)
    try:
        refuse_what_cannot_fit(found, target, Path.cwd(), resolved)
    except UserError as error:
        return {**found.to_dict(), "line": found.line(), "refusal": str(error)}
    return {**found.to_dict(), "line": found.line()}


def tensors_by_config(graph: Graph) -> dict[str, TensorInfo]:
    """The tensors that a checkpoint of the captured ``graph`` would have; of the parts of a weight, one for all."""
    weights = [weight for weight in graph.weights.values() if weight.origin is not None]
    return {w.origin.parts[0].name: TensorInfo(Path(), "F32", tuple(w.shape)) for w in weights if w.origin}


def dry_run(
    model: str, recipe: Recipe, progress: Callable[[str], None] = no_progress, adapters: Sequence[Path] = ()
) -> dict[str, Any]:
    """The plan of ``recipe`` on ``model`` with ``adapters`` merged.

    The plan has for each pass sites, skips and predicted seconds [before, after], and the points of the workload at
    which the model is too large for a prediction here.
    Of alternatives, the candidate with the least predicted cost counts.
    """
    from optkit.pipeline.dry_graph import capture_planned

    resolved = resolve_passes(recipe)
    source = resolve(model, progress, weights=False).with_adapters(adapters)
    refuse_broken_tokenizer(source.directory)
    target, about_target = planning_target(recipe.target)
    progress("capturing the model without weights")
    graph = capture_planned(source.directory, recipe.runtime.max_model_len, source.adapters)
    check_workload(recipe, graph.meta.max_model_len)
    captured = graph
    baseline = {label: after for label, (_, after) in predict(graph, graph, recipe, target).items()}
    passes, alternatives = list[dict[str, Any]](), dict[str, list[dict[str, Any]]]()
    for item in resolved:
        row = [item] if isinstance(item, ResolvedPass) else []
        if isinstance(item, Alternatives):
            trials = predicted_trials(recipe, target, item, graph)
            alternatives[item.name] = [trial.record.to_dict() for trial in trials]
            row = trials[0].passes
        for one in row:
            before = graph
            graph, record = run_pass(before, one, PassContext(target), keep_unmeasured)
            record.predicted = predict(before, graph, recipe, target)
            passes.append(record.to_dict())
    return {
        "model": source.name,
        "recipe": recipe.name,
        "target": asdict(target),
        "baseline": baseline,
        "unpredicted": [p.label for p in workload_points(recipe) if p.label not in baseline],
        "estimate": estimated(
            source.directory, captured, resolved, target, float_copies=recipe.files.float_copies
        ),
        "passes": passes,
        "alternatives": alternatives,
        "notes": [
            *source.notes,
            *notes_on_tokenizer(source.directory),
            *graph.notes,
            *filter(None, [about_target]),
        ],
    }
