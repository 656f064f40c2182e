"""Quantized experts: sites and routers, patterns, kernels, loss and bytes, and the layout on disk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optkit.checkpoint.modules import modules
from optkit.graph import ops
from optkit.graph.ir import Graph, Weight
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import lower
from optkit.passes.quantization.experts import ROUTER, SOME_EXPERTS, routers
from tests.support.graphs import (
    CONTEXT,
    apply,
    captured,
    checked,
    dense,
    random_ids,
    relative_error,
)
from tests.support.target import TARGET

MODELS = ("qwen3_moe", "mixtral", "qwen2_moe")
PASSES = {
    "int8": {"group_size": 32},
    "w4a8": {"group_size": 32},
    "rtn": {"scheme": "W8A16", "group_size": 32},
}
LAYER = "model.layers.0.mlp"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", PASSES)
def test_experts_are_sites_and_run_on_native_kernels(model: str, name: str) -> None:
    before = captured(model)
    graph = before.clone()
    plan = apply(graph, name, **PASSES[name])
    sites = {site.name for site in plan.sites}
    assert {f"{LAYER}.experts.gate_up_proj", f"{LAYER}.experts.down_proj"} <= sites
    assert not list(graph.calls(reference.expert_linear))
    verify(graph)
    op = {"int8": reference.expert_w8a8, "w4a8": reference.expert_w4a8, "rtn": reference.expert_w8a16}[name]
    assert {k for n, k in lower(graph, TARGET).kernels.items() if n.startswith(op.__name__)} == {"native"}
    ids = random_ids((17,))[0]
    first = graph.fx.output_node()
    first.args = (next(graph.calls(op)),)
    graph.prune()
    assert relative_error(dense(graph, ids, TARGET), dense(graph, ids)) < 1e-3


@pytest.mark.parametrize("model", MODELS)
def test_routers_stay_in_float(model: str) -> None:
    """Found by what reads their result: with another name the router is left alone all the same."""
    graph = captured(model)
    found = {str(ops.weight(node).target) for node in routers(graph)}
    assert found == {f"model.layers.{i}.mlp.gate.weight" for i in range(2)}
    _, plan = checked(graph, "int8")
    assert {s.site for s in plan.skips if s.reason == ROUTER} == {n.removesuffix(".weight") for n in found}


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("experts.gate_up_proj", 2),
        (r"re:model\.layers\.1\.mlp\.experts\.", 2),
        (r"re:.*experts\.3\.down_proj", 2),
        (r"re:model\.layers\.0\.mlp\.experts\.2\.up_proj", 1),
    ],
)
def test_ignore_patterns_name_layers_and_experts(pattern: str, left: int) -> None:
    _, plan = checked(captured("qwen3_moe"), "int8", ignore=[pattern])
    skipped = [skip for skip in plan.skips if "experts" in skip.site]
    assert len(skipped) == left
    some = "3" in pattern or "2" in pattern
    assert all((skip.reason == SOME_EXPERTS) == some for skip in skipped)


def test_quantized_experts_lose_little_and_take_less() -> None:
    """KL divergence of the next token and bytes of the experts, int8 and int4, on a tiny model."""
    before, ids = captured("qwen3_moe"), random_ids((37,))[0]
    expected = torch.log_softmax(dense(before, ids), dim=-1)
    losses = []
    for name, most, share in (("int8", 2e-3, 0.27), ("w4a8", 0.4, 0.16)):
        graph = before.clone()
        apply(graph, name, group_size=32)
        logits = torch.log_softmax(dense(graph, ids, TARGET), dim=-1)
        losses.append(float((expected.exp() * (expected - logits)).sum(1).mean()))
        assert 0 < losses[-1] < most
        assert expert_bytes(graph) == pytest.approx(share * expert_bytes(before), rel=0.05)
    assert losses[0] < losses[1]


def expert_bytes(graph: Graph) -> int:
    return sum(weight.value.nbytes for name, weight in graph.weights.items() if ".experts." in name)


def test_experts_are_modules_under_the_names_of_the_checkpoint() -> None:
    graph = captured("mixtral")
    apply(graph, "int8")
    found = {module.name: module for module in modules(graph)}
    for expert in range(4):
        for name, shape in (("w1", (96, 64)), ("w3", (96, 64)), ("w2", (64, 96))):
            module = found[f"model.layers.1.block_sparse_moe.experts.{expert}.{name}"]
            assert module.shape == shape and module.op is reference.linear_w8a8


def test_a_decode_of_experts_is_a_program() -> None:
    """Besides the router, which torch computes, a layer of experts is native calls."""
    graph = captured("qwen3_moe")
    apply(graph, "int8")
    executable = lower(graph, TARGET)
    assert {k for n, k in executable.kernels.items() if n.startswith(("expert_w8a8", "weighted_sum"))} == {
        "native"
    }
    programs = executable.variants[-1].programs
    calls = sum(program.num_calls for program in programs)
    assert programs and calls >= 2 * 8
    ids = random_ids((9,))[0]
    alone = lower(graph, TARGET, programs=False)
    inputs = dense_inputs([9], ids, graph.meta.kv_specs)
    assert torch.equal(executable(inputs), alone(dense_inputs([9], ids, graph.meta.kv_specs)))
    assert relative_error(executable(inputs), dense(captured("qwen3_moe"), ids)) < 0.1


# -- calibration -------------------------------------------------------------------------------------------


def calibrated(name: str, before: Graph, **options: Any) -> tuple[Graph, dict[str, Any]]:
    graph = before.clone()
    optimization, plan = checked(graph, name, scheme="W4A16", group_size=32, **options)
    return graph, optimization.apply(graph, plan, CONTEXT).stats


def error_of(graph: Graph, before: Graph) -> float:
    ids = random_ids((64,))[0]
    return relative_error(dense(graph, ids), dense(before, ids))


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_tokens_of_each_expert_are_counted(name: str) -> None:
    """Two experts a token: the counts of a layer add up to twice the calibration tokens."""
    graph, stats = calibrated(name, captured("qwen3_moe"), calibration={"samples": 16}, expert_tokens=1)
    assert set(stats["expert_tokens"]) == {
        f"model.layers.{i}.mlp.experts.{part}_proj" for i in range(2) for part in ("gate_up", "down")
    }
    for tokens in stats["expert_tokens"].values():
        assert len(tokens) == 4 and sum(tokens) == 2 * stats["calibration_tokens"]
    assert stats["rounded_experts"] == {}
    verify(graph)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_calibrated_experts_may_be_those_of_few_tokens(name: str) -> None:
    before, options = captured("qwen3_moe"), {"calibration": {"samples": 16}, "expert_tokens": 1}
    both, alone = (calibrated(name, before, **options, **more)[0] for more in ({"max_tokens": 4}, {}))
    assert {ops.argument(node, "few").target for node in both.calls(reference.by_tokens)} >= {
        reference.expert_wna16
    }
    (ids,) = random_ids((5,))
    torch.testing.assert_close(dense(both, ids[:4]), dense(alone, ids[:4]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(dense(both, ids), dense(before, ids), atol=1e-4, rtol=1e-4)  # awq moves scales
    assert relative_error(dense(both, ids[:4]), dense(before, ids[:4])) > 1e-2


def test_gptq_of_experts_errs_less_than_rounding() -> None:
    before = captured("qwen3_moe")
    options = {"calibration": {"samples": 64}, "targets": ["re:.*experts.*"]}
    solved, _ = calibrated("gptq", before, expert_tokens=32, **options)
    rounded, stats = calibrated("gptq", before, expert_tokens=10**6, **options)
    assert all(len(experts) == 4 for experts in stats["rounded_experts"].values())
    assert error_of(solved, before) < 0.9 * error_of(rounded, before)


def test_an_expert_without_calibration_tokens_is_named_and_rounded() -> None:
    """A router that hardly ever chooses the first expert: its rows are those of ``rtn``, the others' are not."""
    before = captured("qwen3_moe")
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.gate.weight"
        value = before.weights[name].value.clone()
        value[0] = value[1:].mean(0)  # a score between the others'
        before.weights[name] = Weight(value, before.weights[name].origin)
    options = {"calibration": {"samples": 32}, "targets": ["re:.*experts.*"]}
    site = f"{LAYER}.experts.down_proj"
    counted = calibrated("gptq", before, expert_tokens=1, **options)[1]["expert_tokens"][site]
    graph, stats = calibrated("gptq", before, expert_tokens=min(counted) + 1, **options)
    tokens = stats["expert_tokens"][site]
    few, busy = min(range(4), key=tokens.__getitem__), max(range(4), key=tokens.__getitem__)
    assert tokens[few] < tokens[busy] and stats["rounded_experts"][site] == {str(few): tokens[few]}
    by_rounding = before.clone()
    apply(by_rounding, "rtn", scheme="W4A16", group_size=32)
    solved, rounded = (
        g.weights[f"{site}.weight_packed"].value.unflatten(0, (4, -1)) for g in (graph, by_rounding)
    )
    assert torch.equal(solved[few], rounded[few]) and not torch.equal(solved[busy], rounded[busy])
