"""The pass: it proves the shares, notes the size, leaves the graph alone, and refuses sizes that do not work."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from optkit.errors import UserError
from optkit.graph.serialize import annotations_from_json, graph_to_json
from optkit.graph.variants import contents
from optkit.passes import tensor_parallel
from optkit.passes.tensor_parallel import TensorParallelConfig
from tests.support.graphs import CONTEXT, apply, captured, checked
from tests.support.wrong_rank import with_wrong_weights


def test_the_graph_stays_that_of_one_process_and_notes_the_size() -> None:
    graph, before = captured("llama"), captured("llama")
    optimization, plan = checked(graph, "tensor_parallel", size=2)
    result = optimization.apply(graph, plan, CONTEXT)
    assert result.changed == len(plan.sites) > 8
    assert 0 < result.stats["logit error"] < 1e-4 and 0.4 < result.stats["share of weights"] < 0.6
    assert graph.annotations.pop("tensor_parallel") == 2
    assert contents(graph) == contents(before)


def test_the_size_is_in_graph_json() -> None:
    graph = captured("llama")
    apply(graph, "tensor_parallel", size=2)
    assert annotations_from_json(graph_to_json(graph))["tensor_parallel"] == 2


def test_layers_that_every_rank_computes_are_skipped_with_the_reason() -> None:
    _, plan = checked(captured("olmo2"), "tensor_parallel", size=2)
    skipped = {skip.site: skip.reason for skip in plan.skips}
    assert "rms_norm" in skipped["model.layers.0.self_attn.q_proj"]


def test_sizes_that_do_not_work_are_refused_with_those_that_do() -> None:
    with pytest.raises(
        UserError, match=r"tensor_parallel.size: 3 ranks can't share 2 KV heads evenly.*work: 1, 2"
    ):
        checked(captured("llama"), "tensor_parallel", size=3)
    for size in (0, 1, 65, 2.5):
        with pytest.raises(ValidationError):
            TensorParallelConfig(size=size)


def test_wrong_shares_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured("llama")
    optimization, plan = checked(graph, "tensor_parallel", size=2)
    monkeypatch.setattr(tensor_parallel, "rank_graph", with_wrong_weights(tensor_parallel.rank_graph))
    with pytest.raises(UserError, match="differ from those of one process"):
        optimization.apply(graph, plan, CONTEXT)
