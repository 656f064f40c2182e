"""prune_ffn: the removed channels, the smaller model that transformers loads, and the refused cases."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optkit.capture import capture_directory
from optkit.graph.ir import Graph
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.lowering.lower import lower
from optkit.passes import load
from optkit.passes.prune_ffn import importance
from tests.checkpoint.test_compressed_tensors_writer import transformers_logits, written
from tests.support.architectures import tiny_model
from tests.support.graphs import (
    CONTEXT,
    apply,
    assert_origins_invert,
    captured,
    checked,
    dense,
    random_ids,
    reasons,
)
from tests.support.target import TARGET

(IDS,) = random_ids([24])


def with_dead_channels(graph: Graph, dead: list[int]) -> Graph:
    """The same channels of every layer contribute nothing."""
    for name, weight in graph.weights.items():
        if name.endswith("down_proj.weight"):
            weight.value = weight.value.clone()
            weight.value[:, dead] = 0
    return graph


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_channels_without_effect_go_first(name: str, fused: bool) -> None:
    dead = list(range(0, 96, 3))
    graph = with_dead_channels(captured(name), dead)
    expected = dense(graph, IDS)
    if fused:
        apply(graph, "fuse_gate_up")
    apply(graph, "prune_ffn", ffn=1 / 3, multiple=32)
    verify(graph)
    assert_origins_invert(graph)
    assert graph.annotations["config"] == {"intermediate_size": 64}
    widths = {w.value.shape for n, w in graph.weights.items() if n.endswith("down_proj.weight")}
    assert widths == {torch.Size([64, 64])}
    tolerance = 1e-4 * expected.abs().max().item()
    torch.testing.assert_close(dense(graph, IDS), expected, atol=tolerance, rtol=1e-4)
    torch.testing.assert_close(dense(graph, IDS, TARGET), expected, atol=tolerance, rtol=1e-4)


def test_importance_is_activation_times_weight() -> None:
    down = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    score = importance([torch.tensor([[1.0, -1.0, 9.0]]), torch.tensor([[-3.0, 1.0, 9.0]])], down)
    assert score.tolist() == [2.0, 2.0, 0.0]


def test_a_pruned_artifact_loads_in_transformers_and_again(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "source")
    graph = captured("llama")
    apply(graph, "fuse_gate_up")
    apply(graph, "prune_ffn", ffn=0.3, multiple=32)
    apply(graph, "int8", ignore=["re:.*"])
    written(graph, tmp_path / "source", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["intermediate_size"] == 64
    expected = dense(graph, IDS)
    torch.testing.assert_close(transformers_logits(tmp_path / "out"), expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(
        dense(capture_directory(tmp_path / "out"), IDS), expected, atol=2e-4, rtol=1e-4
    )


def test_it_composes_with_a_quantizer() -> None:
    graph = captured("llama")
    apply(graph, "prune_ffn", ffn=0.3, multiple=32)
    apply(graph, "int8")
    verify(graph)
    assert len(list(graph.calls(reference.linear_w8a8))) == 14 and lower(graph, TARGET)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("llama", {"ffn": 0.1, "multiple": 96}, "are as many in multiples of 96"),
        ("llama", {"ffn": 0.9}, "nothing would be left"),
        ("mixtral", {}, "mixture-of-experts"),
        ("gpt2", {}, "no layer multiplies a gate and up"),
    ],
)
def test_what_cannot_be_pruned_is_left_alone(name: str, options: dict[str, float], reason: str) -> None:
    _, plan = checked(captured(name), "prune_ffn", **options)
    assert not plan.sites and any(reason in given for given in reasons(plan))


def test_where_one_layer_cannot_be_pruned_none_is() -> None:
    graph = captured("llama")
    first = next(n for n in graph.calls(reference.linear) if "down_proj" in str(n.args[1]))
    first.args = (*first.args[:1], graph.weight_node(str(first.args[1].target), first))
    weight = graph.weights[str(first.args[1].target)]
    weight.value = weight.value.to(torch.float64)
    _, plan = checked(graph, "prune_ffn", ffn=0.3, multiple=32)
    assert not plan.sites and any("one number for all layers" in given for given in reasons(plan))


def with_doubled_channels(graph: Graph, pairs: list[tuple[int, int]]) -> Graph:
    """The second channel of each pair is the first again, with a little less in the down projection."""
    for name, weight in graph.weights.items():
        value = weight.value = weight.value.clone()
        for first, second in pairs:
            if name.endswith(("gate_proj.weight", "up_proj.weight")):
                value[second] = value[first]
            if name.endswith("down_proj.weight"):
                value[:, second] = value[:, first] * 0.1
    return graph


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_refit_gives_what_was_removed_to_channels_like_it(name: str, fused: bool) -> None:
    pairs = [(channel, channel + 1) for channel in range(0, 96, 3)]
    graph = with_doubled_channels(captured(name), pairs)
    expected = dense(graph, IDS)
    if fused:
        for row in ("fuse_gate_up", "fuse_add_rms_norm", "select_logits_rows"):
            apply(graph, row)
    plain, refitted = graph.clone(), graph
    apply(plain, "prune_ffn", ffn=1 / 3, multiple=32)
    apply(refitted, "prune_ffn", ffn=1 / 3, multiple=32, refit=True, damping=1e-4)
    verify(refitted)
    assert_origins_invert(refitted)
    assert refitted.annotations["config"] == {"intermediate_size": 64}
    loss, left = (float((dense(g, IDS) - expected).norm() / expected.norm()) for g in (plain, refitted))
    assert left < 0.25 * loss


def test_a_killed_refit_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    pass_class = load("prune_ffn")
    made = pass_class(pass_class.Config(ffn=0.3, multiple=32, refit=True))
    context = replace(CONTEXT, workspace=tmp_path)

    def run() -> Graph:
        graph = captured("llama")
        made.apply(graph, made.check(graph, context), context)
        return graph

    whole = run()
    (tmp_path / "refit" / "0001.safetensors").unlink()  # killed in the second layer
    again = run()
    for name, weight in whole.weights.items():
        assert torch.equal(weight.value, again.weights[name].value), name
