"""bake_prefix plans prompts and leaves the graph as it is; tests/pipeline/test_bake.py bakes."""

from __future__ import annotations

from dataclasses import replace

from optkit.graph.serialize import graph_to_json
from optkit.machine.target import DATASHEETS
from optkit.passes.bake_prefix import BakePrefix, BakePrefixConfig
from optkit.passes.base import PassContext
from tests.support.graphs import captured
from tests.support.target import TARGET


def test_each_prompt_is_a_site_and_the_graph_stays() -> None:
    graph = captured("llama")
    before = graph_to_json(graph)
    config = BakePrefixConfig(prompts=("a.txt", "b.json"))
    found, context = BakePrefix(config), PassContext(TARGET)
    plan = found.check(graph, context)
    assert [site.name for site in plan.sites] == ["a.txt", "b.json", "chat template"]
    assert found.apply(graph, plan, context).changed == 3 and graph_to_json(graph) == before
    assert [s.name for s in BakePrefix(BakePrefixConfig(template=False)).check(graph, context).sites] == []


def test_models_and_targets_without_storable_kv_are_skipped() -> None:
    graph, baking = captured("llama"), BakePrefix()
    (skip,) = baking.check(graph, PassContext(DATASHEETS["cuda-h100"])).skips
    assert "for CPUs alone" in skip.reason
    (skip,) = baking.check(captured("lfm2"), PassContext(TARGET)).skips
    assert "recurrent state" in skip.reason
    graph.meta = replace(graph.meta, states=())
    (skip,) = baking.check(graph, PassContext(TARGET)).skips
    assert skip.reason == "no layer keeps KV"
