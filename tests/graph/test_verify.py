"""The verifier: each invariant, broken by hand, is caught and the place is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from optkit.graph.ir import Graph, Origin, Part, Weight
from optkit.graph.verify import VerifyError, verify
from optkit.kernels import reference
from tests.support.architectures import SPECIFIC
from tests.support.graphs import captured

QUICK = sorted({"llama", "gemma2", "gpt2", "mixtral", "olmo2", "phi3", "qwen2"} & set(SPECIFIC))


@pytest.fixture
def graph() -> Graph:
    return captured("llama")


def node(graph: Graph, name: str) -> fx.Node:
    return next(n for n in graph.fx.nodes if n.name == name)


def output(graph: Graph) -> fx.Node:
    return next(n for n in graph.fx.nodes if n.op == "output")


@pytest.mark.parametrize("name", QUICK)
def test_captured_graphs_are_sound(name: str) -> None:
    verify(captured(name))


def test_an_op_off_the_list(graph: Graph) -> None:
    node(graph, "silu_mul").target = torch.ops.aten.linear_backward.default
    with pytest.raises(VerifyError, match=r"silu_mul calls aten\.linear_backward.*not on the op list"):
        verify(graph)


def test_a_python_function(graph: Graph) -> None:
    node(graph, "silu_mul").target = print
    with pytest.raises(VerifyError, match="silu_mul calls"):
        verify(graph)


def test_a_method_call(graph: Graph) -> None:
    linear = node(graph, "linear")
    with graph.fx.inserting_after(linear):
        graph.fx.call_method("numpy", (linear,))
    with pytest.raises(VerifyError, match="numpy is a call_method node"):
        verify(graph)


@pytest.mark.parametrize(
    ("keyword", "value"),
    [("device", "meta"), ("device", "cpu"), ("layout", 7), ("pin_memory", True), ("memory_format", 3)],
)
def test_a_place_in_memory(graph: Graph, keyword: str, value: object) -> None:
    linear = node(graph, "linear")
    with graph.fx.inserting_after(linear):
        graph.fx.call_function(torch.ops.aten.zeros_like.default, (linear,), {keyword: value}, name="there")
    with pytest.raises(VerifyError, match=f"there sets {keyword}"):
        verify(graph)


def test_use_before_computation(graph: Graph) -> None:
    node(graph, "rms_norm").prepend(node(graph, "linear"))
    with pytest.raises(VerifyError, match="linear reads rms_norm before it is computed"):
        verify(graph)


def test_an_unknown_input(graph: Graph) -> None:
    with graph.fx.inserting_before(next(iter(graph.fx.nodes))):
        graph.fx.placeholder("attention_mask")
    with pytest.raises(VerifyError, match="unknown graph input attention_mask"):
        verify(graph)


def test_a_pool_of_no_layer(graph: Graph) -> None:
    graph.meta = graph.meta.with_kv_specs(graph.meta.kv_specs[:1])
    with pytest.raises(VerifyError, match="unknown graph input k_cache_1"):
        verify(graph)


def test_no_output(graph: Graph) -> None:
    graph.fx.erase_node(output(graph))
    with pytest.raises(VerifyError, match="exactly one output"):
        verify(graph)


def test_a_missing_weight(graph: Graph) -> None:
    del graph.weights["model.norm.weight"]
    with pytest.raises(VerifyError, match=r"model\.norm\.weight is missing"):
        verify(graph)


def test_a_weight_nothing_reads(graph: Graph) -> None:
    graph.weights["left.over"] = Weight(torch.zeros(3), None)
    with pytest.raises(VerifyError, match=r"left\.over is never read"):
        verify(graph)


def test_an_origin_of_too_few_rows(graph: Graph) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    graph.weights[name] = replace(graph.weights[name], origin=Origin((Part(name, 95),)))
    with pytest.raises(VerifyError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has 96 rows"):
        verify(graph)


def test_a_transposed_origin_counts_columns() -> None:
    graph = captured("gpt2")
    verify(graph)
    name = "transformer.h.0.attn.c_attn.weight"
    weight = graph.weights[name]
    assert weight.origin is not None
    graph.weights[name] = replace(weight, origin=replace(weight.origin, transposed=False))
    with pytest.raises(VerifyError, match=r"c_attn\.weight has 192 rows"):
        verify(graph)


def test_a_pool_used_twice(graph: Graph) -> None:
    second = node(graph, "attention_1")
    args = list(second.args)
    args[3:5] = node(graph, "attention").args[3:5]
    second.args = tuple(args)
    with pytest.raises(
        VerifyError, match=r"attention ops use the pools .*'k_cache_0', 'v_cache_0'\), \('k_cache_0'"
    ):
        verify(graph)


@pytest.mark.parametrize(
    ("window", "reason"),
    [(0, "reads more tokens than the 5"), (6, "more tokens than the 5"), ([5], "window is")],
)
def test_a_window_beyond_the_kept_tokens(graph: Graph, window: object, reason: str) -> None:
    graph.meta = graph.meta.with_kv_specs(replace(spec, window=5) for spec in graph.meta.kv_specs)
    for each in graph.calls(reference.attention):
        each.kwargs = {**each.kwargs, "window": 5}
    verify(graph)
    first = node(graph, "attention")
    first.kwargs = {**first.kwargs, "window": window}
    with pytest.raises(VerifyError, match=rf"attention.* {reason}"):
        verify(graph)


def test_pools_swapped_within_a_layer(graph: Graph) -> None:
    first = node(graph, "attention")
    args = list(first.args)
    args[3], args[4] = args[4], args[3]
    first.args = tuple(args)
    with pytest.raises(VerifyError, match="v_cache_0', 'k_cache_0"):
        verify(graph)


def test_a_weight_that_does_not_fit(graph: Graph) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    graph.weights[name] = Weight(torch.zeros(64, 95), Origin((Part(name, 64),)))
    with pytest.raises(VerifyError, match=r"^linear_6: .*\(5, 96\), \(64, 95\)"):
        verify(graph)


def test_a_missing_argument(graph: Graph) -> None:
    node(graph, "rms_norm").args = node(graph, "rms_norm").args[:2]
    with pytest.raises(VerifyError, match=r"^rms_norm: .*eps"):
        verify(graph)


def test_a_constant_that_only_fits_a_prefill_of_the_traced_length(graph: Graph) -> None:
    reshape = node(graph, "view_default_3")
    reshape.args = (reshape.args[0], [5, 64])
    with pytest.raises(VerifyError, match=r"^view_default_3: "):
        verify(graph)


def test_logits_for_all_rows(graph: Graph) -> None:
    node(graph, "select_rows").replace_all_uses_with(node(graph, "rms_norm_4"))
    graph.prune()
    with pytest.raises(VerifyError, match=r"the output is \(5, 128\)"):
        verify(graph)


def test_logits_of_another_dtype(graph: Graph) -> None:
    out = output(graph)
    with graph.fx.inserting_before(out):
        half = graph.fx.call_function(
            torch.ops.aten._to_copy.default, (out.args[0],), {"dtype": torch.float16}
        )
    out.args = (half,)
    with pytest.raises(VerifyError, match=r"torch\.float16, not float32"):
        verify(graph)


def test_an_output_of_two_values(graph: Graph) -> None:
    out = output(graph)
    out.args = ((out.args[0], out.args[0]),)
    with pytest.raises(VerifyError, match="not one tensor"):
        verify(graph)


def test_an_attention_without_pools(graph: Graph) -> None:
    node(graph, "attention").args = node(graph, "attention").args[:3]
    with pytest.raises(VerifyError, match="attention ops use the pools"):
        verify(graph)


def test_dead_code_is_no_error(graph: Graph) -> None:
    linear = node(graph, "linear")
    with graph.fx.inserting_after(linear):
        graph.fx.call_function(reference.silu_mul, (linear, linear))
    verify(graph)
