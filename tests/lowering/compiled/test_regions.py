"""Regions of a graph: which layers are alike, and what a layer reads from outside."""

from __future__ import annotations

from optkit.lowering.compiled.regions import Region, shapes, structure
from tests.passes.test_compile import captured, checked


def test_structure_ignores_names_and_values_but_not_constants():
    graph = captured("gpt2")
    _, plan = checked(graph)
    first, second = (Region.of(site.nodes) for site in plan.sites)
    values = shapes(graph)
    assert structure(first, values) == structure(second, values)
    attention = next(n for n in second.nodes if n.name.startswith("attention"))
    attention.kwargs = {**attention.kwargs, "window": 4}
    assert structure(first, values) != structure(second, values)


def test_region_inputs_are_what_it_reads_from_outside():
    graph = captured("llama")
    _, plan = checked(graph)
    region = Region.of(plan.sites[1].nodes)
    names = {str(node.target) for node in region.inputs if node.op == "placeholder"}
    assert names == {"k_cache_1", "v_cache_1", "slot_mapping", "query_start", "seq_lens", "block_tables"}
    assert all(".1." in str(n.target) for n in region.inputs if n.op == "get_attr")
    assert len(region.outputs) == 1
