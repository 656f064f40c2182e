"""smoothquant: exact in float, and int8 after it is closer where channels are outliers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from optkit.calibration.samples import Calibration
from optkit.graph.ir import Graph, Weight
from optkit.graph.verify import verify
from optkit.passes.base import PassContext
from optkit.passes.quantization.smoothing import smoothing_scale
from optkit.passes.smoothquant import SmoothQuant, SmoothQuantConfig
from tests.support.graphs import (
    apply,
    assert_origins_invert,
    assert_same_logits,
    calibration,
    captured,
    checked,
    checkpoint,
    dense,
    random_ids,
    reasons,
)
from tests.support.target import TARGET

NO_PRODUCER = "no norm weight or up projection to fold the scale into"


@pytest.mark.parametrize(
    ("name", "sites"), [("llama", 6), ("qwen2", 6), ("gemma2", 6), ("phi3", 4), ("olmo2", 2), ("mixtral", 2)]
)
def test_exact_in_float(name: str, sites: int) -> None:
    graph = captured(name)
    before, tensors = graph.clone(), checkpoint(graph)
    plan = apply(graph, "smoothquant")
    assert len(plan.sites) == sites
    verify(graph)
    assert_same_logits(before, graph)
    assert_origins_invert(graph)
    after = checkpoint(graph)
    assert after.keys() == tensors.keys()
    assert sum(not torch.equal(after[key], tensors[key]) for key in tensors) >= 2 * sites
    assert all(
        torch.equal(before.weights[key].value, captured(name).weights[key].value) for key in before.weights
    )


@pytest.mark.parametrize(
    "passes", [("fuse_qkv", "fuse_gate_up"), ("fuse_add_rms_norm",), ("fuse_gate_up", "fuse_add_rms_norm")]
)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_fusing_first_gives_the_same_checkpoint(name: str, passes: tuple[str, ...]) -> None:
    plain, fused = captured(name), captured(name)
    apply(plain, "smoothquant")
    for row in passes:
        apply(fused, row)
    apply(fused, "smoothquant")
    verify(fused)
    assert_same_logits(captured(name), fused)
    first, second = checkpoint(plain), checkpoint(fused)
    assert first.keys() == second.keys()
    for key, value in first.items():
        torch.testing.assert_close(second[key], value, atol=1e-5, rtol=1e-4)


def test_a_bias_of_the_up_projection_is_scaled_too() -> None:
    graph = captured("llama", mlp_bias=True)
    before = graph.clone()
    plan = apply(graph, "smoothquant")
    assert len(plan.sites) == 6
    assert_same_logits(before, graph)
    name = "model.layers.0.mlp.up_proj.bias"
    assert not torch.equal(graph.weights[name].value, before.weights[name].value)


@pytest.mark.parametrize("fusions", [(), ("fuse_qkv", "fuse_gate_up")])
def test_readers_keep_their_input_when_they_are_on_the_ignore_list(fusions: tuple[str, ...]) -> None:
    graph = captured("llama")
    for name in fusions:
        apply(graph, name)
    before = checkpoint(graph)
    plan = apply(graph, "smoothquant", ignore=["q_proj", "re:.*gate_proj"])
    assert len(plan.sites) == 2  # the inputs of the down projections
    assert "on the ignore list" in reasons(plan)
    after = checkpoint(graph)
    changed = {key.split(".")[-2] for key in before if not torch.equal(after[key], before[key])}
    assert changed == {"up_proj", "down_proj"}


# -- planted outliers ------------------------------------------------------------------------------------

CHANNELS, FACTOR = (3, 17, 40), 60.0


@functools.cache
def planted() -> Graph:
    """llama with three channels of each norm's output 60 times larger, and the weights that read them smaller."""
    graph = captured("llama")
    factors = torch.ones(64)
    factors[list(CHANNELS)] = FACTOR
    for name, weight in graph.weights.items():
        part = name.split(".")[-2]
        if part in ("input_layernorm", "post_attention_layernorm"):
            graph.weights[name] = Weight(weight.value * factors, weight.origin)
        if part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            graph.weights[name] = Weight(weight.value / factors, weight.origin)
    return graph


def int8_error(graph: Graph, expected: Tensor, ids: Tensor) -> float:
    quantized = graph.clone()
    apply(quantized, "int8")
    return float((dense(quantized, ids) - expected).norm() / expected.norm())


def test_outliers_cost_int8_less() -> None:
    graph = planted().clone()
    (ids,) = random_ids([40])
    expected = dense(captured("llama"), ids)
    torch.testing.assert_close(dense(graph, ids), expected, atol=1e-3, rtol=1e-3)
    rough = int8_error(graph, expected, ids)
    apply(graph, "smoothquant")
    assert int8_error(graph, expected, ids) < rough / 3


def test_a_search_costs_no_more_than_any_one_exponent() -> None:
    (ids,) = random_ids([40])
    expected = dense(captured("llama"), ids)
    errors = {}
    for alpha in (0.0, 0.5, 1.0, "search"):
        graph = planted().clone()
        apply(graph, "smoothquant", alpha=alpha)
        torch.testing.assert_close(dense(graph, ids), expected, atol=1e-3, rtol=1e-3)
        errors[alpha] = int8_error(graph, expected, ids)
    assert errors.pop("search") < 1.1 * min(errors.values())


def test_the_planted_channels_get_the_largest_scales() -> None:
    graph = planted().clone()
    name = "model.layers.0.input_layernorm.weight"
    before = graph.weights[name].value
    apply(graph, "smoothquant")
    scale = before / graph.weights[name].value
    assert set(scale.topk(3).indices.tolist()) == set(CHANNELS)
    assert float(scale.log().mean()) == pytest.approx(0.0, abs=1e-4)


def test_alpha_moves_the_range() -> None:
    """alpha 1 evens the activations out, alpha 0 the weights."""
    x, w = torch.tensor([1.0, 100.0]), torch.tensor([[2.0, 0.5], [1.0, 0.1]])
    assert torch.allclose(x / smoothing_scale(x, [w], 1.0), torch.full((2,), 10.0))
    flat = (w * smoothing_scale(x, [w], 0.0)).abs().amax(0)
    assert torch.allclose(flat, flat[:1].expand(2))


def test_dead_channels_stay_finite() -> None:
    scale = smoothing_scale(torch.tensor([0.0, 1.0]), [torch.zeros(3, 2)], 0.5)
    assert scale.isfinite().all() and (scale > 0).all()


# -- reasons ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {NO_PRODUCER}),
        ("gemma2", {NO_PRODUCER, "its weight is tied to the embedding"}),
        ("mixtral", {NO_PRODUCER, "something besides linear layers reads its input"}),
        ("olmo2", {NO_PRODUCER, "something besides linear layers reads its input"}),
    ],
)
def test_reasons(name: str, expected: set[str]) -> None:
    _, plan = checked(captured(name), "smoothquant")
    assert reasons(plan) == expected


def test_layer_norms_have_no_site() -> None:
    _, plan = checked(captured("gpt2"), "smoothquant")
    assert not plan.sites
    assert NO_PRODUCER in reasons(plan)


def test_without_calibration_text_it_refuses() -> None:
    graph = captured("llama")
    optimization = SmoothQuant()
    plan = optimization.check(graph, PassContext(TARGET))
    with pytest.raises(ValueError, match="calibration"):
        optimization.apply(graph, plan, PassContext(TARGET))


def test_it_asks_for_the_text_the_recipe_says() -> None:
    asked: list[Calibration] = []

    def text(config: Calibration) -> list[list[int]]:
        asked.append(config)
        return calibration(config)

    graph, wanted = captured("llama"), Calibration(samples=3, seed=7)
    optimization = SmoothQuant(SmoothQuantConfig(calibration=wanted))
    optimization.apply(graph, optimization.check(graph, PassContext(TARGET)), PassContext(TARGET, text))
    assert asked == [wanted]


@pytest.mark.parametrize(
    "options",
    [{"alpha": 1.5}, {"alpha": -0.1}, {"alpha": "find"}, {"calibration": {"samples": 0}}, {"beta": 1}],
)
def test_options_are_bounded(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SmoothQuantConfig(**options)
