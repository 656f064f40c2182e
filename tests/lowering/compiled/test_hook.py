"""The interface of compiled layers: code that is there runs, and a graph without a plan passes through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optkit.graph.ir import Graph
from optkit.lowering.compiled import hook
from optkit.lowering.compiled.plan import CompiledCode, region_source
from optkit.lowering.compiled.region import Variant
from tests.lowering.compiled.test_plan import planned
from tests.passes.test_compile import TARGET, captured, checked
from tests.support.graphs import dense, random_ids

(IDS,) = random_ids([6])


def logits(model: Any) -> torch.Tensor:
    from optkit.lowering.dense import dense_inputs

    return model(dense_inputs([len(IDS)], IDS, model.kv_specs))


def test_graph_without_a_plan_or_without_code_is_lowered_as_it_is(tmp_path: Path) -> None:
    graph = captured("gpt2")
    for each in (graph, planned(graph)):
        model = hook.lower_with_code(each, TARGET, native=tmp_path / "native")
        assert model.special is None
        assert torch.equal(logits(model), dense(graph, IDS, TARGET))


def test_found_code_runs_in_the_place_of_the_planned_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, runs, asked = planned(captured("gpt2")), list[int](), list[Any]()
    source = region_source(graph, TARGET)

    def code(inputs: list[torch.Tensor]) -> Any:
        runs.append(len(inputs))
        return source.module(*inputs)

    def find(graph: Graph, target: Any, native: Any, *, trust: bool) -> CompiledCode:
        asked.append((native, trust))
        return CompiledCode(source, (Variant(1, None, code),))

    monkeypatch.setattr(hook, "find_code", find)
    model = hook.lower_with_code(graph, TARGET, native=Path("native"), trust=True, programs=False)
    torch.testing.assert_close(logits(model), dense(captured("gpt2"), IDS, TARGET), atol=2e-5, rtol=1e-5)
    assert len(runs) == 2 and asked == [(Path("native"), True)]  # a run for each layer


def test_fused_nodes_are_those_of_the_planned_layers() -> None:
    graph = captured("gpt2")
    assert hook.fused_nodes(graph) == set()
    _, plan = checked(graph)
    assert hook.fused_nodes(planned(graph)) == {node.name for site in plan.sites for node in site.nodes}
