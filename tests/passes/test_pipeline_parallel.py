"""The pass: it proves the stages, notes their number, leaves the graph alone, and refuses what does not work."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from optkit.errors import UserError
from optkit.graph.serialize import annotations_from_json, graph_to_json
from optkit.graph.variants import contents
from optkit.passes import pipeline_parallel
from optkit.passes.pipeline_parallel import PipelineParallelConfig
from tests.support.graphs import CONTEXT, captured, checked
from tests.support.wrong_rank import with_wrong_weights


def test_the_graph_stays_that_of_one_process_and_notes_the_size() -> None:
    graph, before = captured("llama"), captured("llama")
    optimization, plan = checked(graph, "pipeline_parallel", size=2)
    result = optimization.apply(graph, plan, CONTEXT)
    assert result.changed == len(plan.sites) == 1
    assert result.stats["logit error"] == 0.0 and 0.4 < result.stats["share of weights"] < 0.6
    assert annotations_from_json(graph_to_json(graph))["pipeline_parallel"] == 2
    assert graph.annotations.pop("pipeline_parallel") == 2
    assert contents(graph) == contents(before)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"pipeline_parallel\.size: 3 stages need as many layers with attention"
    ):
        checked(captured("llama"), "pipeline_parallel", size=3)
    for size in (0, 1, 65, 2.5):
        with pytest.raises(ValidationError):
            PipelineParallelConfig(size=size)


@pytest.mark.parametrize(
    "names", [("tensor_parallel", "pipeline_parallel"), ("pipeline_parallel", "tensor_parallel")]
)
def test_a_graph_that_ranks_share_is_refused(names: tuple[str, str]) -> None:
    graph = captured("llama")
    optimization, plan = checked(graph, names[0], size=2)
    optimization.apply(graph, plan, CONTEXT)
    with pytest.raises(UserError, match=rf"{names[1]}\.size: .*can't be combined"):
        checked(graph, names[1], size=2)


def test_wrong_stages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured("llama")
    optimization, plan = checked(graph, "pipeline_parallel", size=2)
    monkeypatch.setattr(pipeline_parallel, "stage_graph", with_wrong_weights(pipeline_parallel.stage_graph))
    with pytest.raises(UserError, match="differ from those of one process"):
        optimization.apply(graph, plan, CONTEXT)


def test_a_plan_of_shapes_alone_has_the_share_of_the_weights() -> None:
    graph: Any = captured("llama")
    for weight in graph.weights.values():
        weight.value = weight.on_meta()
    optimization, plan = checked(graph, "pipeline_parallel", size=2)
    stats = optimization.apply(graph, plan, CONTEXT).stats
    assert set(stats) == {"share of weights"} and 0.4 < stats["share of weights"] < 0.6
    assert graph.annotations["pipeline_parallel"] == 2
