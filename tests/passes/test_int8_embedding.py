"""int8 with ``embedding``: one table for the head and the embedding, in the graph, in memory and on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from optkit.artifact.export import export
from optkit.artifact.open import Artifact
from optkit.capture import capture_directory
from optkit.checkpoint.insertion import fall_back, float_origins, quantized_sites
from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_to_json
from optkit.graph.verify import VerifyError, verify
from optkit.kernels import reference
from optkit.lowering.lower import lower
from tests.checkpoint.test_compressed_tensors_writer import transformers_logits, written
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, assert_origins_invert, captured, dense, random_ids, reasons
from tests.support.target import TARGET

HEAD = {"lm_head": True, "weight_only": ["lm_head"]}
ONLY_HEAD = {**HEAD, "targets": ["lm_head"]}
EMBEDDING = "model.embed_tokens"
(IDS,) = random_ids([24])


def shared(model: str = "llama", **options: object) -> Graph:
    """A tied model in int8, with a shared table of the vocabulary."""
    graph = captured(model, tie_word_embeddings=True)
    apply(graph, "int8", **{**HEAD, "group_size": 32, "embedding": True, **options})
    return graph


def in_float(graph: Graph) -> Graph:
    """The captured model with the float values of the shared table of ``graph``."""
    floats = captured("llama", tie_word_embeddings=True)
    codes, scale = (graph.weights[f"lm_head.{key}"].value.double() for key in ("weight", "weight_scale"))
    table = (codes.view(len(codes), scale.shape[1], -1) * scale[..., None]).flatten(1)
    floats.weights[floats.meta.input_embedding].value = table.float()
    return floats


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tied"
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_embedding_and_head_read_one_int8_table(model: str) -> None:
    graph = shared(model)
    verify(graph)
    assert_origins_invert(graph)
    (rows,), (head,) = graph.calls(reference.embedding_w8), graph.calls(reference.linear_w8a16)
    assert [str(a.target) for a in rows.args[1:]] == [str(a.target) for a in head.args[1:3]]
    tables = [weight for weight in graph.weights.values() if weight.value.shape[:1] == (128,)]
    assert sum(weight.value.nbytes for weight in tables) < 0.3 * 4 * 128 * 64
    assert {part.name for t in tables if t.origin for part in t.origin.parts} == {
        f"{EMBEDDING}.weight",
        f"{EMBEDDING}.weight_scale",
    }


@pytest.mark.parametrize("native", [False, True])
def test_logits_are_those_of_the_dequantized_table(native: bool) -> None:
    graph = shared(targets=["lm_head"])
    expected = dense(in_float(graph), IDS)
    torch.testing.assert_close(dense(graph, IDS, TARGET if native else None), expected, atol=2e-4, rtol=1e-4)


def test_lowering_packs_the_table_once() -> None:
    graph = shared(targets=["lm_head"])
    alone = captured("llama", tie_word_embeddings=True)
    apply(alone, "int8", **ONLY_HEAD, group_size=32)
    one, two = (lower(g, TARGET).weight_bytes for g in (graph, alone))
    assert two - one == 4 * 128 * 64  # the float table


@pytest.mark.parametrize("options", [{}, {"group_size": 0}])
def test_the_artifact_has_one_table_and_loads_in_transformers(
    source: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    pytest.importorskip("compressed_tensors")
    graph = shared(targets=["lm_head"], **options)
    artifact = written(graph, source, tmp_path / "out")
    assert graph_to_json(artifact.graph()) == graph_to_json(graph)
    with safe_open(str(artifact.directory / "model.safetensors"), framework="pt") as file:
        names = file.keys()
        tables = {key: file.get_tensor(key) for key in names if "embed" in key or "head" in key}
    assert {key: value.dtype for key, value in tables.items()} == {
        f"{EMBEDDING}.weight": torch.int8,
        f"{EMBEDDING}.weight_scale": torch.float16,
        "lm_head.weight_scale": torch.float16,
    }
    expected = dense(in_float(graph), IDS)
    torch.testing.assert_close(transformers_logits(artifact.directory), expected, atol=2e-4, rtol=1e-4)


def test_the_artifact_with_all_layers_in_int8_loads_in_transformers(source: Path, tmp_path: Path) -> None:
    """transformers divides activations by 127.5 steps, so the logits are close and not equal."""
    pytest.importorskip("compressed_tensors")
    graph = shared(weight_only=["re:.*"])
    given = transformers_logits(written(graph, source, tmp_path / "out").directory)
    torch.testing.assert_close(given, dense(graph, IDS), atol=2e-4, rtol=1e-4)


def test_the_artifact_is_a_source_again(source: Path, tmp_path: Path) -> None:
    graph = shared(targets=["lm_head"])
    first = written(graph, source, tmp_path / "first")
    again = capture_directory(first.directory)
    verify(again)
    assert next(again.calls(reference.embedding_w8), None) is not None
    torch.testing.assert_close(dense(again, IDS), dense(graph, IDS), atol=1e-5, rtol=1e-5)
    second = written(again, first.directory, tmp_path / "second")
    one, other = (a.directory / "model.safetensors" for a in (first, second))
    assert one.read_bytes() == other.read_bytes()


def test_scales_of_another_table_are_refused(source: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    artifact = written(shared(targets=["lm_head"]), source, tmp_path / "out")
    file = artifact.directory / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight_scale"] = tensors["lm_head.weight_scale"] * 2
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lm_head\.weight is missing"):
        capture_directory(artifact.directory)


def test_export_writes_floats_and_refuses_gptq(source: Path, tmp_path: Path) -> None:
    graph = shared(targets=["lm_head"])
    artifact = written(graph, source, tmp_path / "out")
    export(artifact, "hf", tmp_path / "hf")
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    expected = dense(in_float(graph), IDS)
    torch.testing.assert_close(transformers_logits(tmp_path / "hf"), expected, atol=2e-4, rtol=1e-4)
    with pytest.raises(UserError, match="take the embedding to be float"):
        export(Artifact.open(artifact.directory), "gptq", tmp_path / "gptq")


def test_head_and_embedding_fall_back_together() -> None:
    before, graph = captured("llama", tie_word_embeddings=True), shared()
    whole = fall_back(graph, quantized_sites(graph))
    verify(whole)
    assert float_origins(whole) == {} and torch.equal(dense(whole, IDS), dense(before, IDS))
    head = fall_back(graph, ["lm_head"])
    verify(head)
    assert not list(head.calls(reference.embedding_w8)) and list(head.calls(reference.linear_w8a8))


@pytest.mark.parametrize(
    ("tied", "options", "reason"),
    [
        (False, HEAD, "the output head has a weight of its own"),
        (True, {}, "the output head is not quantized for all steps here, and only its weight is shared"),
        (True, {**HEAD, "max_tokens": 4}, "the output head is not quantized for all steps here"),
        (True, {"lm_head": True}, "the output head is not on the weight_only list"),
    ],
)
def test_embedding_stays_float_with_a_reason(tied: bool, options: dict[str, object], reason: str) -> None:
    graph = captured("llama", tie_word_embeddings=tied)
    plan = apply(graph, "int8", embedding=True, **options)
    assert any(reason in found for found in reasons(plan))
    assert not list(graph.calls(reference.embedding_w8)) and next(graph.calls(reference.embedding), None)


def test_a_table_with_too_few_rows_is_refused() -> None:
    graph = shared()
    for key in ("weight", "weight_scale"):
        weight = graph.weights[f"lm_head.{key}"]
        weight.value = weight.value[:100]
    with pytest.raises(VerifyError):
        verify(graph)
