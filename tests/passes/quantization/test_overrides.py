"""Options for some of the layers: the formats of the layers, refused overrides, fused layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optkit.checkpoint.modules import modules
from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.verify import verify
from optkit.passes import load
from tests.support.graphs import apply, captured, checked, dense, random_ids, reasons, relative_error

OVERRIDES = {
    "down_proj": {"scheme": "W8A16", "group_size": 32},
    "re:.*o_proj": {"scheme": "W8A8", "group_size": 0},
}


def found_formats(graph: Graph) -> dict[str, set[tuple[int, int]]]:
    """(bits, scales of a row) of the quantized layers, by the last part of the name."""
    found: dict[str, set[tuple[int, int]]] = {}
    for module in modules(graph):
        scales = module.operands["weight_scale"]
        found.setdefault(module.name.rpartition(".")[2], set()).add((module.bits, scales.shape[1]))
    return found


@pytest.mark.parametrize("name", ["rtn", "gptq", "awq"])
def test_a_layer_has_the_options_of_the_first_pattern_that_fits(name: str) -> None:
    graph = captured("llama")
    options: dict[str, Any] = {"scheme": "W4A16", "group_size": 16, "overrides": OVERRIDES}
    if name != "rtn":
        options["calibration"] = {"samples": 2}
    apply(graph, name, **options)
    verify(graph)
    found = found_formats(graph)
    width, inner = 64, 96
    assert found["down_proj"] == {(8, inner // 32)}
    assert found["o_proj"] == {(8, 1)}
    assert found["q_proj"] == found["up_proj"] == {(4, width // 16)}


def test_more_bits_for_some_layers_bring_the_logits_nearer_to_the_model() -> None:
    ids = random_ids([24])[0]
    expected, errors = dense(captured("llama"), ids), []
    for overrides in ({}, {"re:.*layers.1.*": {"scheme": "W8A16"}}, {"down_proj": {"scheme": "W8A16"}}):
        graph = captured("llama")
        apply(graph, "rtn", scheme="W3A16", group_size=16, targets=["down_proj"], overrides=overrides)
        errors.append(relative_error(dense(graph, ids), expected))
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize(
    ("name", "overrides", "scales"),
    [("int8", {"group_size": 32}, 3), ("w4a8", {"group_size": 96, "activation_group_size": 0}, 1)],
)
def test_groups_of_native_formats_are_overridden(name: str, overrides: dict[str, Any], scales: int) -> None:
    graph = captured("llama")
    apply(graph, name, overrides={"down_proj": overrides})
    found = found_formats(graph)
    assert {count for _, count in found["down_proj"]} == {scales}
    assert {count for _, count in found["up_proj"]} == ({1} if name == "int8" else {2})


def test_a_layer_limited_to_few_tokens_keeps_its_overrides_and_its_float_activations() -> None:
    """Variants have names of their own; patterns are for the modules."""
    graph = captured("llama")
    apply(
        graph,
        "int8",
        max_tokens=4,
        lm_head=True,
        weight_only=["lm_head"],
        overrides={"down_proj": {"group_size": 32}},
    )
    found = {module.name: module for module in modules(graph)}
    heads = [module for name, module in found.items() if name.startswith("lm_head")]
    assert heads and all(module.op.__name__ == "linear_w8a16" for module in heads)
    downs = [module for name, module in found.items() if "down_proj" in name]
    assert downs and all(module.operands["weight_scale"].shape[1] == 3 for module in downs)


def test_overrides_of_some_fused_layers_skip_the_layer_with_the_reason() -> None:
    graph = captured("llama")
    apply(graph, "fuse_qkv")
    _, plan = checked(graph, "rtn", group_size=16, overrides={"v_proj": {"scheme": "W8A16"}})
    assert "the overrides of 'v_proj' are for some of the layers fused into it" in reasons(plan)
    _, plan = checked(graph, "rtn", group_size=16, overrides={"re:.*(q|k|v)_proj": {"scheme": "W8A16"}})
    assert len([site for site in plan.sites if "qkv" in site.name]) == 2


def test_a_pattern_without_a_layer_is_refused() -> None:
    with pytest.raises(UserError, match=r"override 'down_porj' is no linear layer.*'down_proj'"):
        checked(captured("llama"), "rtn", overrides={"down_porj": {"group_size": 16}})


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("gptq", {"a": {"calibration": {}}}, "'calibration' is no option of a layer"),
        ("gptq", {"a": {"damp": 0.1}}, "did you mean 'damping'"),
        ("gptq", {"a": {"scheme": "W5A16"}}, "there is no scheme 'W5A16'"),
        ("gptq", {"a": {"scheme": "W8A8", "actorder": "group"}}, "actorder 'group' needs"),
        ("rtn", {"re:(": {}}, "not a regular expression"),
        ("int8", {"a": {"group_size": 7}}, "group_size"),
        ("w4a8", {"a": {"group_size": 64, "activation_group_size": 32}}, "multiple of group_size"),
    ],
)
def test_wrong_overrides_are_refused_when_the_recipe_is_read(
    name: str, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(name).Config(overrides=overrides)


def test_gptq_solves_each_layer_with_its_own_options() -> None:
    """A layer without clipping has the scales of its largest weights, computed here in float64."""
    before = {name: weight.value.double() for name, weight in captured("llama").weights.items()}
    graph = captured("llama")
    apply(
        graph,
        "gptq",
        scheme="W4A16",
        group_size=16,
        calibration={"samples": 2},
        overrides={"re:.*layers\\.0\\..*down_proj": {"clip": False}},
    )
    ratios = {}
    for module in modules(graph):
        if module.name.endswith("down_proj"):
            weight = before[f"{module.name}.weight"].unflatten(1, (-1, 16))
            largest = weight.abs().amax(-1)
            ratios[module.name] = module.operands["weight_scale"].double() / largest
    first, second = (ratios[f"model.layers.{i}.mlp.down_proj"] for i in range(2))
    assert torch.unique(first.round(decimals=3)).numel() <= 2
    assert second.min() < 0.98 * first.min()
