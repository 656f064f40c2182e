"""The plan without the work: which sites each pass would change, and what the roofline predicts.

The model is built on the meta device, so no weight is read, a config is enough, and a model for a GPU that is not here
can be planned. Passes run on that graph in order, exactly as they would; only measuring and judging are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from optkit.checkpoint.locate import resolve
from optkit.evaluation.speed import workload_points
from optkit.graph.verify import verify
from optkit.lowering.cost import predict_seconds
from optkit.machine.target import get_target
from optkit.passes.base import PassContext
from optkit.passes.resolve import resolve_passes
from optkit.pipeline.records import PassRecord
from optkit.recipe.schema import Recipe


def dry_run(
    model: str, recipe: Recipe, progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """The plan of ``recipe`` on ``model``: per pass its sites, skips and predicted seconds [before, after]."""
    from optkit.pipeline.dry_graph import capture_planned

    resolved = resolve_passes(recipe)
    source = resolve(model, progress, weights=False)
    target = get_target(recipe.target)
    progress("capturing the model without weights")
    graph = capture_planned(source.directory)
    points = workload_points(recipe)
    baseline = {point.label: predict_seconds(graph, point, target) for point in points}
    passes, previous = [], baseline
    for item in resolved:
        optimization = item.pass_class(item.config)
        plan = optimization.check(graph, PassContext(target))
        record = PassRecord.planned(optimization.name, item.config.model_dump(), plan)
        record.changed = optimization.apply(graph, plan, PassContext(target)).changed
        verify(graph)
        after = {point.label: predict_seconds(graph, point, target) for point in points}
        record.predicted = {label: [previous[label], after[label]] for label in after}
        passes.append(record.to_dict())
        previous = after
    return {
        "model": source.name,
        "recipe": recipe.name,
        "target": asdict(target),
        "baseline": baseline,
        "passes": passes,
    }
