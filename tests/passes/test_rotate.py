"""rotate: the same model in exact arithmetic, in transformers too; the skips; and int8 with fewer outliers to round."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from optkit.capture import capture_directory
from optkit.errors import UserError
from optkit.graph.ir import Graph, Weight
from optkit.graph.verify import verify
from optkit.passes.resolve import resolve_passes
from optkit.passes.rewriting.hadamard import rotation
from optkit.recipe.load import parse_recipe
from tests.checkpoint.test_compressed_tensors_writer import written
from tests.support.architectures import tiny_model
from tests.support.graphs import (
    apply,
    assert_origins_invert,
    assert_same_logits,
    captured,
    checked,
    checkpoint,
    dense,
    random_ids,
    reasons,
    relative_error,
)
from tests.support.target import TARGET

FUSIONS = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "select_logits_rows")
STREAM = "residual stream"
LAYERS = ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"]
LAYER_NORM = "its norms subtract the mean (LayerNorm), which does not commute with a rotation"
COLUMNS = "its heads are not plain columns of projections"
(IDS,) = random_ids([24])


def double_logits(directory: Path) -> Tensor:
    """Logits [T, V] of transformers in float64, with eager attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, local_files_only=True, attn_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(IDS[None], use_cache=False).logits[0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("model", "options", "sites"),
    [
        ("llama", {}, [STREAM, *LAYERS]),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, [STREAM, *LAYERS]),
        ("llama", {"hidden_size": 72, "head_dim": 12, "num_attention_heads": 6}, [STREAM, *LAYERS]),
        ("qwen2", {}, [STREAM, *LAYERS]),  # biases
        ("qwen3", {}, [STREAM, *LAYERS]),  # norms of q and k
        ("gemma", {"head_dim": 16}, [STREAM, *LAYERS]),  # norms of 1 + w, a scaled and tied embedding
        ("granite", {}, [STREAM, *LAYERS]),  # scaled residuals and logits
        ("smollm3", {}, [STREAM, *LAYERS]),
        ("phi3", {}, [STREAM]),  # q, k and v are slices
        ("gemma2", {}, LAYERS),  # a norm after each block
        ("starcoder2", {}, LAYERS),  # LayerNorm
        ("mixtral", {}, LAYERS),  # experts
    ],
)
def test_rotate_keeps_the_logits_when_other_passes_ran_before(
    model: str, options: dict[str, Any], sites: list[str], fused: bool
) -> None:
    graph = captured(model, **options)
    before = graph.clone()
    for name in FUSIONS if fused else ():
        apply(graph, name)
    plan = apply(graph, "rotate")
    verify(graph)
    assert [site.name for site in plan.sites] == sites
    assert_same_logits(before, graph)
    assert_origins_invert(graph)
    changed = [
        key for key, value in checkpoint(before).items() if not torch.equal(value, checkpoint(graph)[key])
    ]
    assert len([key for key in changed if key.endswith(("v_proj.weight", "o_proj.weight"))]) in (2, 4)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False}),
        ("qwen3", {}),
        ("gemma", {"head_dim": 16}),
        ("granite", {"tie_word_embeddings": True}),
        ("starcoder2", {}),  # heads only
    ],
)
def test_transformers_gives_the_same_logits_in_float64_from_a_rotated_artifact(
    tmp_path: Path, model: str, options: dict[str, Any]
) -> None:
    """The weights of both sides are float32, so only their last bits differ."""
    tiny_model(model, **options).save_pretrained(tmp_path / "source")
    graph = captured(model, **options)
    apply(graph, "fuse_qkv")
    plan = apply(graph, "rotate")
    written(graph, tmp_path / "source", tmp_path / "out")
    expected, logits = double_logits(tmp_path / "source"), double_logits(tmp_path / "out")
    assert 0 < relative_error(logits, expected) < 1e-6
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if plan.sites[0].name == STREAM:
        assert config["tie_word_embeddings"] is False
    again = capture_directory(tmp_path / "out")
    torch.testing.assert_close(dense(again, IDS), expected.float(), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gpt2", {LAYER_NORM, "q, k and v are not three projections, or one for all"}),
        ("starcoder2", {LAYER_NORM}),
        ("stablelm", {LAYER_NORM, COLUMNS}),
        ("phi3", {COLUMNS}),
        ("gemma2", {"rms_norm_1, which is no linear layer, is added to the residual stream"}),
        ("mixtral", {"expert_linear, which is no linear layer, reads a norm of the residual stream"}),
    ],
)
def test_check_gives_the_reason_when_a_part_cannot_be_rotated(model: str, expected: set[str]) -> None:
    _, plan = checked(captured(model), "rotate")
    assert reasons(plan) == expected


def test_check_skips_the_stream_when_a_weight_has_another_use() -> None:
    graph = captured("llama")
    first, second = (node for node in graph.fx.nodes if str(node.target).endswith("up_proj.weight"))
    second.replace_all_uses_with(first)
    graph.prune()
    _, plan = checked(graph, "rotate", heads=False)
    (reason,) = reasons(plan)
    assert not plan.sites and reason.startswith("something else uses a weight of linear")


def test_check_skips_the_stream_when_a_weight_is_no_checkpoint_tensor() -> None:
    graph = captured("llama")
    name = "model.layers.1.mlp.down_proj.weight"
    graph.weights[name] = Weight(graph.weights[name].value, None)
    _, plan = checked(graph, "rotate")
    assert [site.name for site in plan.sites] == LAYERS
    (reason,) = reasons(plan)
    assert reason.endswith("is not a float32 checkpoint tensor")


def test_heads_false_turns_the_input_of_the_value_projection_alone() -> None:
    graph = captured("llama")
    before = graph.clone()
    plan = apply(graph, "rotate", heads=False)
    assert [site.name for site in plan.sites] == [STREAM]
    name, norm = "model.layers.0.self_attn.v_proj.weight", "model.layers.0.input_layernorm.weight"
    folded = before.weights[name].value * before.weights[norm].value
    torch.testing.assert_close(graph.weights[name].value, rotation(64, seed=0)(folded))
    assert (graph.weights[norm].value == 1).all()


def test_apply_unties_the_head_when_weights_have_no_values() -> None:
    graph = captured("llama", tie_word_embeddings=True)
    graph.weights = {
        name: replace(weight, stored=weight.value.to("meta")) for name, weight in graph.weights.items()
    }
    apply(graph, "rotate")
    verify(graph)
    assert (
        graph.weights["lm_head.weight"].value.shape == graph.weights["model.embed_tokens.weight"].value.shape
    )


def with_outliers(graph: Graph) -> Graph:
    """A few channels of the residual stream are a hundred times larger, as in trained models."""
    for name, weight in graph.weights.items():
        if name.endswith("embed_tokens.weight"):
            weight.value = weight.value.clone()
            weight.value[:, [3, 40]] *= 100
    return graph


@pytest.mark.parametrize("group_size", [0, 32])
def test_int8_is_closer_after_rotate_when_channels_are_outliers(group_size: int) -> None:
    plain, rotated = (with_outliers(captured("llama", tie_word_embeddings=False)) for _ in range(2))
    expected = dense(plain, IDS)
    apply(rotated, "rotate")
    for graph in (plain, rotated):
        apply(graph, "int8", group_size=group_size)
    error = [relative_error(dense(graph, IDS, TARGET), expected) for graph in (plain, rotated)]
    assert error[1] < 0.8 * error[0], error


def test_rotate_composes_with_smoothing_and_an_int8_cache() -> None:
    graph = captured("llama", tie_word_embeddings=True)
    expected = dense(graph, IDS)
    for name in FUSIONS:
        apply(graph, name)
    apply(graph, "rotate")
    apply(graph, "smoothquant", alpha="search")
    torch.testing.assert_close(dense(graph, IDS), expected, atol=2e-4, rtol=1e-4)
    apply(graph, "int8", lm_head=True, weight_only=["lm_head"])
    apply(graph, "kv_int8")
    verify(graph)
    assert relative_error(dense(graph, IDS, TARGET), expected) < 0.15


def test_rotate_is_the_same_again_and_differs_by_seed() -> None:
    graphs = [captured("llama") for _ in range(3)]
    for graph, seed in zip(graphs, (0, 0, 1), strict=True):
        apply(graph, "rotate", seed=seed)
    name = "model.layers.0.mlp.down_proj.weight"
    first, second, other = (graph.weights[name].value for graph in graphs)
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_a_seed_beyond_64_bits_is_refused_by_name() -> None:
    text = "schema_version: 1\nname: demo\npasses:\n  rotate: {{seed: {}}}\n"
    (last,) = resolve_passes(parse_recipe(text.format((1 << 63) - 1)))
    assert rotation(8, last.config.seed).signs.abs().sum() == 8
    with pytest.raises(
        UserError, match=r"passes\.rotate\.seed: Input should be less than 9223372036854775808"
    ):
        resolve_passes(parse_recipe(text.format(1 << 63)))
