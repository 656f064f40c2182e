"""Layers with a variant for few tokens and one for many: each step gets its own, for all passes and kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from optkit.checkpoint.insertion import fall_back, quantized_sites
from optkit.graph import variants
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_from_json, graph_to_json
from optkit.graph.shapes import Point
from optkit.graph.verify import VerifyError, verify
from optkit.kernels import reference
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import lower
from optkit.machine.target import DATASHEETS, Target
from tests.support.graphs import apply, assert_origins_invert, captured, graph_cost, random_ids, reasons
from tests.support.target import TARGET

H200 = DATASHEETS["cuda-h200"]
FEW = ("rtn", {"scheme": "W4A16", "group_size": 32, "max_tokens": 4})
W4A8 = ("w4a8", {"max_tokens": 4})
FUSED = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "select_logits_rows")


def graph_with(*passes: tuple[str, Mapping[str, Any]], model: str = "llama", fused: bool = False) -> Graph:
    graph = captured(model)
    for name in FUSED if fused else ():
        apply(graph, name)
    for name, options in passes:
        apply(graph, name, **options)
        verify(graph)
    return graph


def logits(graph: Graph, tokens: int, target: Target | None = None, **options: Any) -> Tensor:
    (ids,) = random_ids([tokens])
    return lower(graph, target, **options)(dense_inputs([tokens], ids, graph.meta.kv_specs))


def few_alone(*passes: tuple[str, Mapping[str, Any]], **options: Any) -> Graph:
    """What ``graph_with`` gives where the variant for few tokens is the only one."""
    without = [
        (name, {k: v for k, v in given.items() if k != "max_tokens"})
        for name, given in passes
        if "max_tokens" in given
    ]
    return graph_with(*without, **options)


def many_alone(*passes: tuple[str, Mapping[str, Any]], **options: Any) -> Graph:
    return graph_with(*(p for p in passes if "max_tokens" not in p[1]), **options)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("model", ["llama", "qwen2", "gemma2", "phi3", "qwen3_moe"])
@pytest.mark.parametrize("passes", [(FEW,), (FEW, ("fp8", {})), (W4A8, ("int8", {}))])
def test_a_step_has_the_variant_for_its_tokens(passes: Any, model: str, fused: bool) -> None:
    graph = graph_with(*passes, model=model, fused=fused)
    assert_origins_invert(graph)
    few, many = few_alone(*passes, model=model, fused=fused), many_alone(*passes, model=model, fused=fused)
    for target in (None, TARGET):
        for tokens in (1, 4):
            assert torch.equal(logits(graph, tokens, target), logits(few, tokens, target))
        for tokens in (5, 23):
            assert torch.equal(logits(graph, tokens, target), logits(many, tokens, target))
    assert not torch.equal(logits(few, 4), logits(many, 4))


def test_what_is_not_lowered_chooses_too() -> None:
    """The op itself says the same as lowering: here every op runs as written in the graph."""
    graph = graph_with(FEW, ("fp8", {}))
    for tokens in (4, 5):
        (ids,) = random_ids([tokens])
        inputs = dense_inputs([tokens], ids, graph.meta.kv_specs)
        values: dict[Any, Any] = {}
        for node in graph.fx.nodes:
            if node.op == "placeholder":
                values[node] = inputs[node.target]
            elif node.op == "get_attr":
                values[node] = graph.weights[node.target].value
            elif node.op == "call_function":
                arguments = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*arguments[0], **arguments[1])
            else:
                assert torch.equal(values[node.args[0]], logits(graph, tokens))


def test_three_variants() -> None:
    graph = graph_with(
        ("rtn", {"scheme": "W4A16", "group_size": 32, "max_tokens": 2}),
        ("rtn", {"scheme": "W8A16", "max_tokens": 8}),
    )
    assert variants.spans(graph) == {
        "up to 2 tokens": 2, "up to 8 tokens": 8, "more than 8 tokens": 9
    }  # fmt: skip
    alone = [graph_with(("rtn", {"scheme": s, "group_size": g})) for s, g in (("W4A16", 32), ("W8A16", 0))]
    for tokens, same in ((2, alone[0]), (3, alone[1]), (8, alone[1]), (9, captured("llama"))):
        assert torch.equal(logits(graph, tokens), logits(same, tokens))


def test_a_graph_without_variants_is_itself() -> None:
    graph = captured("llama")
    assert variants.at(graph, 1) is graph and variants.spans(graph) == {}


def test_weights_of_no_variant_are_there_once() -> None:
    """Embedding, norms and head are not doubled: not on a CPU, and not where they are cast and moved."""
    graph = graph_with(FEW, ("fp8", {}))
    embedding = graph.weights[graph.meta.input_embedding].value.nbytes
    for target, options in ((TARGET, {}), (H200, {"device": "cpu", "dtype": torch.float16})):
        both = lower(graph, target, **options).weight_bytes
        apart = [lower(variants.at(graph, n), target, **options).weight_bytes for n in (4, 5)]
        assert max(apart) < both < sum(apart) - embedding / 2


def test_lowered_for_a_gpu_each_variant_is_fused_by_itself() -> None:
    graph = graph_with(FEW, ("fp8", {}), fused=True)
    model = lower(graph, H200, device="cpu", dtype=torch.float16)
    few, many = (
        {getattr(n.target, "__name__", "") for n in variant.module.graph.nodes} for variant in model.variants
    )
    assert [variant.limit for variant in model.variants] == [4, None]
    assert not any("quantize" in name for name in few) and any("quantize" in name for name in many)


def test_consumed_it_is_the_same() -> None:
    graph = graph_with(W4A8, ("int8", {}))
    (ids,) = random_ids([3])
    expected = logits(graph, 3, TARGET)
    inputs = dense_inputs([3], ids, graph.meta.kv_specs)
    model = lower(graph, TARGET, consume=True)
    assert not graph.weights and torch.equal(model(inputs), expected)


def test_saved_and_read() -> None:
    graph = graph_with(FEW, ("fp8", {}))
    again = graph_from_json(graph_to_json(graph), lambda name, origin, dtype: graph.weights[name].value)
    verify(again)
    assert all(torch.equal(logits(again, n), logits(graph, n)) for n in (4, 5))


def test_given_back_layers_have_their_other_variant() -> None:
    graph = graph_with(FEW, ("fp8", {}))
    sites = quantized_sites(graph)
    few = next(site for site in sites if site.endswith("up_to_4_tokens"))
    one = fall_back(graph, {few})
    verify(one)
    assert few not in quantized_sites(one) and len(quantized_sites(one)) == len(sites) - 1
    assert torch.equal(logits(one, 5), logits(graph, 5)) and not torch.equal(logits(one, 4), logits(graph, 4))
    none = fall_back(graph, {site for site in sites if site.endswith("up_to_4_tokens")})
    assert variants.limits(none) == [] and torch.equal(
        logits(none, 4), logits(many_alone(FEW, ("fp8", {})), 4)
    )
    floats = fall_back(graph, set(sites))
    assert torch.equal(logits(floats, 3), logits(captured("llama"), 3))


def test_the_cost_is_that_of_the_variant() -> None:
    graph = graph_with(FEW, ("fp8", {}))
    one, two = Point(4, 4, 64), Point(5, 5, 64)
    assert graph_cost(graph, one).weight_bytes == graph_cost(variants.at(graph, 4), one).weight_bytes
    assert graph_cost(graph, one).weight_bytes < graph_cost(graph, two).weight_bytes


def test_not_compiled() -> None:
    from tests.support.graphs import checked

    _, plan = checked(graph_with(FEW), "compile")
    assert not plan.sites and any("several variants" in reason for reason in reasons(plan))


def test_calibrated_variants_see_the_rounding_before_them() -> None:
    """GPTQ for few tokens is the GPTQ it would be for all."""
    options = {"scheme": "W4A16", "group_size": 32}
    both = graph_with(("gptq", options | {"max_tokens": 4}), ("fp8", {}))
    assert torch.equal(logits(both, 4), logits(graph_with(("gptq", options)), 4))


@pytest.mark.parametrize("bad", [{"limit": 0}, {"limit": 4.5}, {"positions": "slot_mapping"}])
def test_damaged_variants_are_refused(bad: Mapping[str, Any]) -> None:
    graph = graph_with(FEW)
    node = next(graph.calls(reference.by_tokens))
    few, many, _, limit = node.args
    node.args = (few, many, graph.input(bad.get("positions", "positions")), bad.get("limit", limit))
    with pytest.raises(VerifyError):
        verify(graph)


def test_variants_are_few() -> None:
    graph = graph_with(FEW)
    for limit, node in enumerate(graph.calls(reference.by_tokens), 1):
        node.args = (*node.args[:3], limit)
    with pytest.raises(VerifyError, match="more than 4 variants"):
        verify(graph)


def test_two_variants_that_have_no_room_are_one() -> None:
    from optkit.passes import load
    from optkit.passes.base import PassContext

    pass_class = load("rtn")
    quantize = pass_class(pass_class.Config(**FEW[1]))
    plan = quantize.check(captured("llama"), PassContext(replace(TARGET, memory_bytes=1 << 16)))
    assert not plan.sites and any("two variants of all layers take" in reason for reason in reasons(plan))
