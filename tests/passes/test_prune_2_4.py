"""prune_2_4: the pattern in every layer, an artifact that transformers and compressed-tensors read, predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from optkit.capture import capture_directory
from optkit.errors import UserError
from optkit.graph.ir import TWO_FOUR
from optkit.graph.shapes import Point
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.kernels.two_four import is_two_four
from optkit.lowering.cost import predict_seconds
from optkit.lowering.lower import lower
from optkit.machine.target import get_target
from tests.checkpoint.test_compressed_tensors_writer import transformers_logits, written
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, assert_origins_invert, captured, checked, dense, random_ids, reasons
from tests.support.target import TARGET

(IDS,) = random_ids([24])
METHODS = ("sparsegpt", "wanda", "magnitude")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])  # gpt2 stores its weights transposed
def test_every_layer_but_the_head_is_sparse(name: str, method: str) -> None:
    graph = captured(name)
    if name == "llama":
        apply(graph, "fuse_qkv")
    plan = apply(graph, "prune_2_4", method=method)
    verify(graph)
    assert_origins_invert(graph)
    sparse = [node for node in graph.linears() if is_two_four(graph.linear_weight(node))]
    assert [node.name for node in sparse] == graph.annotations[TWO_FOUR] and len(sparse) == len(plan.sites)
    assert len(list(graph.linears())) == len(sparse) + 1


def test_the_better_ways_are_closer_to_the_source() -> None:
    source, errors = dense(captured("llama"), IDS), []
    for method in METHODS:
        graph = captured("llama")
        apply(graph, "prune_2_4", method=method)
        errors.append(float((dense(graph, IDS) - source).norm()))
    assert errors[0] < errors[2]


@pytest.mark.parametrize("quantized", [False, True])
def test_the_artifact_is_read_by_transformers_and_compressed_tensors(quantized: bool, tmp_path: Path) -> None:
    from compressed_tensors.config import SparsityCompressionConfig

    tiny_model("llama").save_pretrained(tmp_path / "source")
    graph = captured("llama")
    apply(graph, "fuse_qkv")
    apply(graph, "prune_2_4", method="magnitude", ignore=["re:.*layers.1.*down_proj"])
    if quantized:
        apply(graph, "int8", targets=["re:.*layers.0.*gate_proj"])
    artifact = written(graph, tmp_path / "source", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    described = config["sparsity_config"]
    read = SparsityCompressionConfig.load_from_registry(described["format"], **described)
    assert read.sparsity_structure == "2:4" and 0.3 < read.global_sparsity < 0.5
    assert set(described["ignore"]) == {"lm_head", "model.layers.1.mlp.down_proj"}
    expected = dense(graph, IDS)
    tolerance = 2e-2 if quantized else 2e-4  # transformers scales activations of int8 layers otherwise
    torch.testing.assert_close(transformers_logits(tmp_path / "out"), expected, atol=tolerance, rtol=1e-2)
    served = artifact.graph()
    assert served.annotations[TWO_FOUR] == graph.annotations[TWO_FOUR]
    assert torch.equal(dense(served, IDS, TARGET), dense(graph, IDS, TARGET))
    if not quantized:
        again = capture_directory(tmp_path / "out")
        torch.testing.assert_close(dense(again, IDS), expected, atol=2e-4, rtol=1e-4)
        assert sum(is_two_four(again.linear_weight(node)) for node in again.linears()) == 13


def test_a_gpu_is_predicted_to_gain_and_a_cpu_not() -> None:
    graph = captured("llama")
    before = graph.clone()
    apply(graph, "prune_2_4", method="magnitude")
    point, gpu = Point(tokens=4096, sequences=8, context=512), get_target("cuda-h100")
    assert predict_seconds(graph, point, gpu) < predict_seconds(before, point, gpu)
    assert predict_seconds(graph, point, TARGET) == predict_seconds(before, point, TARGET)
    assert lower(graph, TARGET)


def test_what_stays_dense() -> None:
    graph = captured("llama")
    _, plan = checked(graph, "prune_2_4", ignore=["o_proj"])
    assert {"in ignore", "the output head stays dense; name it in targets to prune it"} <= reasons(plan)
    _, plan = checked(graph, "prune_2_4", targets=["lm_head"])
    assert [site.name for site in plan.sites] == ["lm_head"] and "not in targets" in reasons(plan)
    tied = captured("llama", tie_word_embeddings=True)
    _, plan = checked(tied, "prune_2_4", targets=["lm_head"])
    assert not plan.sites and "its weight is tied to the embedding" in reasons(plan)
    with pytest.raises(UserError, match="no linear layer"):
        checked(graph, "prune_2_4", targets=["o_prj"])
    apply(graph, "int8")
    assert not checked(graph, "prune_2_4")[1].sites and not list(graph.calls(reference.expert_linear))
