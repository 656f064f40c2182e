"""drop_layers: the layers that do least go, what is left is a model that transformers loads, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from optkit.capture import capture_directory
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_to_json
from optkit.graph.verify import verify
from optkit.passes.drop_layers import block_influence
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
WRITERS = ("o_proj", "down_proj", "dense", "fc2", "dense_4h_to_h", "experts.down_proj")
FUSIONS = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "select_logits_rows")


def with_idle_layers(graph: Graph, idle: set[int]) -> Graph:
    """The layers ``idle`` add nothing to the residual stream."""
    for name, weight in graph.weights.items():
        parts = name.split(".")
        module = ".".join(parts[-2:-1])
        if weight.origin and module in WRITERS and any(str(number) in parts for number in idle):
            weight.value = torch.zeros_like(weight.value)
        if weight.origin and parts[-1] == "bias" and module in WRITERS and any(str(n) in parts for n in idle):
            weight.value = torch.zeros_like(weight.value)
    return graph


@pytest.mark.parametrize("idle", [{0}, {1}, {1, 2}, {0, 1}, {0, 2}])
@pytest.mark.parametrize("fused", [False, True])
def test_layers_without_effect_go_first(idle: set[int], fused: bool) -> None:
    graph = with_idle_layers(captured("llama", num_hidden_layers=4), idle)
    expected = dense(graph, IDS)
    for row in FUSIONS if fused else ():
        apply(graph, row)
    apply(graph, "drop_layers", count=len(idle))
    verify(graph)
    assert_origins_invert(graph)
    assert graph.annotations["config"] == {"num_hidden_layers": 4 - len(idle)}
    assert [spec.layer for spec in graph.meta.kv_specs] == list(range(4 - len(idle)))
    assert f"layers.{4 - len(idle)}." not in graph_to_json(graph)
    torch.testing.assert_close(dense(graph, IDS), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(dense(graph, IDS, TARGET), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "phi", "gpt_neox", "stablelm", "mixtral", "phi3"])
def test_many_architectures(name: str) -> None:
    """Against transformers, with the same layer taken out of the module."""
    model = tiny_model(name, num_hidden_layers=3).eval()
    graph = captured(name, num_hidden_layers=3)
    optimization, plan = checked(graph, "drop_layers", count=1)
    stats = optimization.apply(graph, plan, CONTEXT).stats
    verify(graph)
    (removed,) = stats["removed"]
    layers = model.base_model.layers
    kept = [layer for index, layer in enumerate(layers) if index != removed]
    model.base_model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = 2
    with torch.no_grad():
        expected = model(IDS[None], use_cache=False).logits[0]
    torch.testing.assert_close(dense(graph, IDS), expected, atol=2e-4, rtol=1e-4)


def test_influence_is_the_mean_angle() -> None:
    x = torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    y = torch.tensor([[0.0, 3.0], [5.0, 0.0]])
    assert block_influence([(x, y)]) == pytest.approx(0.5)
    assert block_influence([(x, y), (x, x)]) == pytest.approx(0.25)


@pytest.mark.parametrize("name", ["llama", "qwen3"])  # qwen3's config has a list with an entry for each layer
def test_the_artifact_loads_in_transformers_and_again(name: str, tmp_path: Path) -> None:
    tiny_model(name, num_hidden_layers=4).save_pretrained(tmp_path / "source")
    graph = with_idle_layers(captured(name, num_hidden_layers=4), {1})
    for row in FUSIONS:
        apply(graph, row)
    apply(graph, "drop_layers", count=1)
    written(graph, tmp_path / "source", tmp_path / "out")
    config: dict[str, Any] = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 3 and len(config.get("layer_types", "123")) == 3
    expected: Tensor = dense(graph, IDS)
    torch.testing.assert_close(transformers_logits(tmp_path / "out"), expected, atol=2e-4, rtol=1e-4)
    again = capture_directory(tmp_path / "out")
    assert len(again.meta.kv_specs) == 3
    torch.testing.assert_close(dense(again, IDS), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("llama", {"count": 2}, "there are 2, and the last stays"),
        ("gemma2", {}, "different attention"),
        ("gpt2", {}, "has no num_hidden_layers"),
        ("lfm2", {}, ""),
        ("deepseek_v3", {}, ""),
    ],
)
def test_what_cannot_be_cut_is_left_alone(name: str, options: dict[str, int], reason: str) -> None:
    _, plan = checked(captured(name), "drop_layers", **options)
    assert not plan.sites and any(reason in given for given in reasons(plan))


def test_it_composes_with_other_passes() -> None:
    graph = captured("llama", num_hidden_layers=4)
    apply(graph, "drop_layers", count=2)
    apply(graph, "prune_ffn", ffn=0.3, multiple=32, refit=True)
    apply(graph, "int8")
    verify(graph)
    assert graph.annotations["config"] == {"num_hidden_layers": 2, "intermediate_size": 64}
