"""prune_heads: whole KV groups go, what is left is a smaller model that transformers loads, and where it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from optkit.capture import capture_directory
from optkit.graph.ir import Graph
from optkit.graph.verify import verify
from optkit.passes import prune_heads
from optkit.passes.prune_heads import names_head_size
from tests.checkpoint.test_compressed_tensors_writer import transformers_logits, written
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, assert_origins_invert, captured, checked, dense, random_ids, reasons
from tests.support.target import TARGET

(IDS,) = random_ids([24])


def with_dead_group(graph: Graph, group: int, width: int) -> Graph:
    """What the heads of one KV group compute is multiplied by nothing."""
    for name, weight in graph.weights.items():
        if name.endswith("o_proj.weight"):
            weight.value = weight.value.clone()
            weight.value[:, group * width : (group + 1) * width] = 0
    return graph


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize(("name", "fused"), [("llama", False), ("llama", True), ("qwen3", True)])
def test_heads_without_effect_go_first(name: str, fused: bool, group: int) -> None:
    graph = with_dead_group(captured(name), group, width=2 * 16)
    expected = dense(graph, IDS)
    for row in ("fuse_qkv", "select_logits_rows") if fused else ():
        apply(graph, row)
    apply(graph, "prune_heads", share=0.5)
    verify(graph)
    assert_origins_invert(graph)
    assert graph.annotations["config"] == {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    assert {spec.num_kv_heads for spec in graph.meta.kv_specs} == {1}
    tolerance = 1e-4 * expected.abs().max().item()
    torch.testing.assert_close(dense(graph, IDS), expected, atol=tolerance, rtol=1e-4)
    torch.testing.assert_close(dense(graph, IDS, TARGET), expected, atol=tolerance, rtol=1e-4)


def test_a_pruned_artifact_loads_in_transformers_and_again(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "source")
    graph = captured("llama")
    apply(graph, "fuse_qkv")
    apply(graph, "prune_heads", share=0.5)
    apply(graph, "prune_ffn", ffn=0.3, multiple=32)
    written(graph, tmp_path / "source", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")] == [2, 1, 16]
    assert config["intermediate_size"] == 64
    expected = dense(graph, IDS)
    torch.testing.assert_close(transformers_logits(tmp_path / "out"), expected, atol=2e-4, rtol=1e-4)
    again = capture_directory(tmp_path / "out")
    torch.testing.assert_close(dense(again, IDS), expected, atol=2e-4, rtol=1e-4)


def test_it_composes_with_quantizers() -> None:
    graph = captured("llama")
    apply(graph, "prune_heads", share=0.5)
    apply(graph, "int8")
    apply(graph, "kv_int8")
    verify(graph)
    assert dense(graph, IDS, TARGET).isfinite().all()


@pytest.mark.parametrize(
    ("name", "share", "reason"),
    [
        ("llama", 0.1, "2 KV groups less 10% are as many"),
        ("gpt2", 0.5, "not three projections, or one for all"),
        ("olmo2", 0.5, "not three projections, or one for all"),  # a norm over all heads
    ],
)
def test_what_cannot_be_pruned_is_left_alone(name: str, share: float, reason: str) -> None:
    _, plan = checked(captured(name), "prune_heads", share=share)
    assert not plan.sites and any(reason in given for given in reasons(plan)), reasons(plan)


def test_a_model_whose_config_has_no_head_size_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_head_size("llama") and not names_head_size("gpt2") and not names_head_size("unheard_of")
    monkeypatch.setattr(prune_heads, "names_head_size", lambda model_type: False)
    _, plan = checked(captured("llama"), "prune_heads", share=0.5)
    assert not plan.sites and any("no head size of its own" in given for given in reasons(plan))
