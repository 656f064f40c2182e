"""Quantized layers on disk: what transformers makes of them, and that the runtime reads only what it needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from optkit.artifact.open import Artifact
from optkit.capture import capture_directory
from optkit.checkpoint.compressed_tensors_writer import PACKED_FILE, smallest_exact
from optkit.checkpoint.locate import ModelSource
from optkit.checkpoint.modules import modules
from optkit.checkpoint.tensors import TensorFiles
from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_to_json
from optkit.kernels import reference
from optkit.pipeline.publish import write_artifact
from optkit.pipeline.records import RunRecord
from optkit.recipe.load import parse_recipe
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, captured, dense, random_ids
from tests.support.target import TARGET

RECIPE = "schema_version: 1\nname: small\ntarget: cpu\npasses:\n  w4a8: {{}}\nfiles: {{float_copies: {}}}\n"
(IDS,) = random_ids([24])
FORCE = False  # replace an artifact


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(directory)
    return directory


def written(graph: Graph, source: Path, out: Path, *, float_copies: bool = False) -> Artifact:
    model = ModelSource("tiny", source, "0" * 64)
    run, recipe = RunRecord([], None), parse_recipe(RECIPE.format(str(float_copies).lower()))
    write_artifact(out, graph, model, recipe, run, TARGET, {"optkit": "0"}, force=FORCE)
    return Artifact.open(out)


def quantized(*passes: tuple[str, dict[str, object]]) -> Graph:
    graph = captured("llama")
    for name, options in passes:
        apply(graph, name, **options)
    return graph


def int4_beside_int8_head(directory: Path, tied: bool) -> tuple[Path, Graph]:
    """A model in a new directory below ``directory``, and its graph with quantized layers."""
    source = directory / "tiny"
    tiny_model("llama", tie_word_embeddings=tied).save_pretrained(source)
    graph = captured("llama", tie_word_embeddings=tied)
    apply(graph, "w4a8")
    apply(graph, "int8", lm_head=True, weight_only=["lm_head"], embedding=tied)
    return source, graph


def in_float(graph: Graph) -> Graph:
    """The captured model with the weights that ``graph``'s int4 codes stand for."""
    floats = captured("llama")
    for module in modules(graph):
        if module.op is reference.linear_w4a8:
            floats.weights[f"{module.name}.weight"].value = module.float_weight()
    return floats


def transformers_logits(directory: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        return model.eval()(IDS[None], use_cache=False).logits[0]


def config(directory: Path) -> dict[str, object]:
    return json.loads((directory / "config.json").read_text())


def stored(file: Path) -> set[str]:
    with safe_open(str(file), framework="pt") as tensors:
        return set(tensors.keys())


FUSED = (("fuse_qkv", {}), ("fuse_gate_up", {}))


@pytest.mark.parametrize("head", [False, True])
def test_symmetric_weights_load_in_transformers(source: Path, tmp_path: Path, head: bool) -> None:
    """transformers multiplies in float by the values the codes stand for."""
    pytest.importorskip("compressed_tensors")
    graph = quantized(*FUSED, ("w4a8", {"symmetric": True, "lm_head": head}))
    artifact = written(graph, source, tmp_path / "out")
    names = stored(artifact.directory / "model.safetensors")
    assert "model.layers.0.self_attn.k_proj.weight_packed" in names
    assert "model.layers.0.self_attn.k_proj.weight" not in names
    assert not (artifact.directory / "optkit" / PACKED_FILE).exists()
    expected = dense(in_float(graph), IDS)
    torch.testing.assert_close(transformers_logits(artifact.directory), expected, atol=2e-4, rtol=1e-4)


def test_float_minimums_load_in_transformers_as_float(source: Path, tmp_path: Path) -> None:
    graph = quantized(*FUSED, ("w4a8", {}))
    artifact = written(graph, source, tmp_path / "out", float_copies=True)
    assert "quantization_config" not in config(artifact.directory)
    assert stored(artifact.directory / "model.safetensors") == stored(source / "model.safetensors")
    expected = dense(in_float(graph), IDS)
    torch.testing.assert_close(transformers_logits(artifact.directory), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("symmetric", [False, True])
def test_beside_int8(source: Path, tmp_path: Path, symmetric: bool) -> None:
    pytest.importorskip("compressed_tensors")
    graph = quantized(("w4a8", {"symmetric": symmetric, "ignore": ["down_proj"]}), ("int8", {}))
    artifact = written(graph, source, tmp_path / "out", float_copies=True)
    expected = dense(in_float(graph), IDS)
    loss = (expected - dense(captured("llama"), IDS)).norm()
    assert (transformers_logits(artifact.directory) - expected).norm() < 0.2 * loss


@pytest.mark.parametrize(("symmetric", "float_copies"), [(True, False), (False, False), (False, True)])
def test_the_artifact_gives_the_same_graph(
    source: Path, tmp_path: Path, symmetric: bool, float_copies: bool
) -> None:
    graph = quantized(*FUSED, ("w4a8", {"symmetric": symmetric}))
    again = written(graph, source, tmp_path / "out", float_copies=float_copies).graph()
    assert graph_to_json(again) == graph_to_json(graph)
    assert all(torch.equal(again.weights[name].value, w.value) for name, w in graph.weights.items())
    assert torch.equal(dense(again, IDS, TARGET), dense(graph, IDS, TARGET))


def test_the_runtime_does_not_read_the_float_copies(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = written(quantized(*FUSED, ("w4a8", {})), source, tmp_path / "out", float_copies=True)
    read: list[str] = []
    get = TensorFiles.__getitem__
    monkeypatch.setattr(TensorFiles, "__getitem__", lambda self, name: read.append(name) or get(self, name))
    artifact.graph()
    assert read and not any("_proj" in name for name in read)


@pytest.mark.parametrize("tied", [False, True])
def test_codes_alone_are_a_third_of_the_size_and_no_weights_for_transformers(
    tmp_path: Path, tied: bool
) -> None:
    """int4 beside an int8 head, which compressed-tensors has a format for: one file has them all."""
    source, graph = int4_beside_int8_head(tmp_path, tied)
    sizes = {}
    for float_copies in (False, True):
        artifact = written(graph, source, tmp_path / str(float_copies), float_copies=float_copies)
        files = [*artifact.directory.glob("*.safetensors"), artifact.directory / "optkit" / PACKED_FILE]
        sizes[float_copies] = sum(file.stat().st_size for file in files)
    alone = tmp_path / "False"
    assert sizes[False] < 0.4 * sizes[True]
    assert "quantization_config" not in config(alone)
    assert not any("safetensors" in file.name for file in alone.iterdir())
    names = stored(alone / "optkit" / PACKED_FILE)
    assert {"model.layers.0.mlp.up_proj.weight_packed", "model.norm.weight"} <= names
    assert "model.layers.0.mlp.up_proj.weight" not in names
    with pytest.raises(OSError, match="safetensors"):
        transformers_logits(alone)
    with pytest.raises(UserError, match="no weights") as refusal:
        capture_directory(alone)
    assert "optkit export" in str(refusal.value.fix)


def test_a_lossless_encoding_leaves_the_source_as_it_is(source: Path, tmp_path: Path) -> None:
    """From a checkpoint whose values are on the grid, nothing is written anew."""
    first = written(quantized(("w4a8", {})), source, tmp_path / "first", float_copies=True)
    graph = captured("llama")
    for name, weight in in_float(first.graph()).weights.items():
        graph.weights[name].value = weight.value
    apply(graph, "w4a8")
    second = written(graph, first.directory, tmp_path / "second", float_copies=True)
    one, other = (a.directory / "model.safetensors" for a in (first, second))
    assert one.read_bytes() == other.read_bytes()


def test_smallest_exact() -> None:
    assert smallest_exact(torch.tensor([0.5, -3.0])).dtype == torch.float16
    assert smallest_exact(torch.tensor([0.5, 0.1])).dtype == torch.float32
