"""Compile plans: the digest of a planned layer, and plans that do not fit the graph."""

from __future__ import annotations

import pytest
import torch

from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.lowering.compiled.plan import planned_regions, region_source
from optkit.lowering.lower import lower
from tests.passes.test_compile import CONTEXT, TARGET, captured, checked
from tests.support.graphs import dense, random_ids

FUSED = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "int8", "flash_attention")


def planned(graph: Graph, **options) -> Graph:
    """A copy of ``graph`` with a compile plan."""
    copy = graph.clone()
    optimization, plan = checked(copy, **options)
    optimization.apply(copy, plan, CONTEXT)
    return copy


def test_without_code_a_plan_changes_nothing():
    graph = captured("gpt2")
    assert lower(planned(graph), TARGET).special is None
    (ids,) = random_ids([8])
    assert torch.equal(dense(planned(graph), ids, TARGET), dense(graph, ids, TARGET))


def test_the_digest_is_of_the_layer_and_not_of_its_weights():
    graph = planned(captured("llama", FUSED, layers=3))
    other = graph.clone()
    for weight in other.weights.values():
        weight.value = weight.value.clone()
    digest = region_source(graph, TARGET).digest
    assert region_source(other, TARGET).digest == digest
    assert region_source(planned(captured("llama", FUSED, layers=4)), TARGET).digest == digest
    assert region_source(planned(captured("llama", FUSED[1:], layers=3)), TARGET).digest != digest
    assert region_source(graph, None).digest != digest, "other kernels"


def test_a_plan_that_does_not_fit_is_refused():
    graph = planned(captured("gpt2"))
    names = graph.annotations["compile"]["regions"]
    assert len(planned_regions(graph, names)) == 2
    for bad in (
        [["nothing"]], [[]], [names[0][::-1]], [names[0], names[1][:-1]], [names[0][:3]], [], None, "x", [7], [[7]],
    ):  # fmt: skip
        graph.annotations["compile"]["regions"] = bad
        with pytest.raises(UserError):
            region_source(graph, TARGET)
