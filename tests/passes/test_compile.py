"""compile: which layers it finds alike, what it says of the others, and the plan it leaves."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_from_json, graph_to_json
from optkit.graph.verify import verify
from optkit.lowering.compiled.hook import fused_nodes
from optkit.machine.target import Target, cpu_isa
from optkit.passes import compile as compile_pass
from optkit.passes import load
from optkit.passes.base import PassContext
from optkit.passes.compile import Compile, CompileConfig
from tests.support.graphs import captured as tiny_graph

TARGET = Target("cpu", "cpu", cpu_isa(), 2, 1 << 33, 1e11, 4e11, 0.0, 0.0, 1e10, "measured")
CONTEXT = PassContext(TARGET)


def captured(name: str, passes: tuple[str, ...] = (), layers: int = 2) -> Graph:
    """A tiny model's graph after ``passes``, of its own."""
    depth = {} if layers == 2 else {"num_hidden_layers": layers}
    graph = tiny_graph(name, **depth | ({"n_layer": layers} if name == "gpt2" else {}))
    for row in passes:
        optimization = load(row)()
        optimization.apply(graph, optimization.check(graph, CONTEXT), CONTEXT)
    return graph


def checked(graph: Graph, **options):
    optimization = Compile(CompileConfig(**options))
    return optimization, optimization.check(graph, CONTEXT)


def test_equal_layers_are_one_group():
    _, plan = checked(captured("llama", layers=3))
    assert [site.name for site in plan.sites] == ["layer 0", "layer 1", "layer 2"]
    assert not plan.skips
    lengths = {len(site.nodes) for site in plan.sites}
    assert len(lengths) == 1


def test_fused_first_layer_is_skipped_with_the_reason():
    _, plan = checked(captured("llama", ("fuse_add_rms_norm",), layers=3))
    assert [site.name for site in plan.sites] == ["layer 1", "layer 2"]
    assert [(skip.site, "no residual addition" in skip.reason) for skip in plan.skips] == [("layer 0", True)]


def test_local_and_global_layers_are_told_apart():
    _, plan = checked(captured("gemma3_text"))
    assert [site.name for site in plan.sites] == ["layer 0", "layer 2"]
    (skip,) = plan.skips
    assert skip.site == "layer 1"
    assert skip.reason == "differs from the compiled layer: sliding window none instead of 8"


def test_a_pinned_kernel_sets_a_layer_apart():
    graph = captured("gpt2", layers=3)
    attention = next(n for n in graph.fx.nodes if n.name == "attention_2")
    attention.meta["kernel"] = "sdpa"
    _, plan = checked(graph)
    assert [(skip.site, skip.reason) for skip in plan.skips] == [
        ("layer 2", "its kernels differ from the compiled layer's")
    ]


@pytest.mark.parametrize("name", ["gpt_neox", "opt", "glm4", "gemma2", "mixtral"])
def test_every_layer_is_a_site_or_a_skip(name):
    graph = captured(name)
    optimization, plan = checked(graph)
    layers = {entry.name for entry in plan.sites} | {entry.site for entry in plan.skips}
    assert layers == {f"layer {spec.layer}" for spec in graph.meta.kv_specs}
    assert optimization.apply(graph, plan, CONTEXT).changed == len(plan.sites)
    verify(graph)


def test_unnumbered_layers_are_skipped_whole():
    graph = captured("gpt2")
    for weight in graph.weights.values():
        weight.origin = None
    _, plan = checked(graph)
    assert not plan.sites
    assert [skip.reason for skip in plan.skips] == ["no weight's name carries a layer number"]


def test_interleaved_layers_are_skipped_whole():
    graph = captured("gpt2", layers=3)
    origins = {n: w.origin for n, w in graph.weights.items()}
    graph.weights["transformer.h.2.ln_1.weight"].origin = origins["transformer.h.0.ln_1.weight"]
    graph.weights["transformer.h.2.ln_1.bias"].origin = origins["transformer.h.0.ln_1.bias"]
    _, plan = checked(graph)
    assert not plan.sites
    assert "not contiguous" in plan.skips[0].reason


def test_without_a_compiler_all_layers_are_skipped(monkeypatch):
    monkeypatch.setattr(compile_pass, "has_compiler", lambda: False)
    _, plan = checked(captured("gpt2"))
    assert not plan.sites
    assert len(plan.skips) == 2
    assert all("no C++ compiler" in skip.reason for skip in plan.skips)


def test_nothing_to_compile_for():
    _, plan = checked(captured("gpt2"), buckets=[], dynamic_tail=False)
    assert not plan.sites


def test_without_named_buckets_they_are_left_to_be_chosen():
    graph = captured("gpt2")
    optimization, plan = checked(graph, max_buckets=3)
    optimization.apply(graph, plan, CONTEXT)
    assert (graph.annotations["compile"]["buckets"], graph.annotations["compile"]["max_buckets"]) == (None, 3)


def test_plan_round_trips_and_names_its_nodes():
    graph = captured("llama")
    before = [node.name for node in graph.fx.nodes]
    optimization, plan = checked(graph, buckets=[1, 128])
    result = optimization.apply(graph, plan, CONTEXT)
    assert result.changed == len(plan.sites)
    assert [node.name for node in graph.fx.nodes] == before
    again = graph_from_json(graph_to_json(graph), lambda name, origin, dtype: graph.weights[name].value)
    assert again.annotations == graph.annotations
    assert again.annotations["compile"]["buckets"] == [[1, 1], [128, 128]]
    assert fused_nodes(again) == {node.name for site in plan.sites for node in site.nodes}
    assert fused_nodes(again) < {node.name for node in again.fx.nodes}


@pytest.mark.parametrize("buckets", [[0], [-1], [2, 1], [1, 1], list(range(1, 10))])
def test_bad_buckets_are_refused(buckets):
    with pytest.raises(ValidationError):
        CompileConfig(buckets=buckets)
