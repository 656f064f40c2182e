"""Artifacts of packed layers: what transformers and compressed-tensors make of them, and export to other formats and
back, always to the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors import safe_open
from torch import Tensor

from optkit.artifact.export import export
from optkit.artifact.open import Artifact
from optkit.capture import capture_directory
from optkit.checkpoint.modules import modules
from optkit.checkpoint.source import open_source
from optkit.cli import main
from optkit.errors import UserError
from optkit.graph.ir import Graph
from tests.checkpoint.test_compressed_tensors_writer import (
    int4_beside_int8_head,
    transformers_logits,
    written,
)
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, captured, dense, random_ids
from tests.support.packers import GPTQ, checkpoint, gptq
from tests.support.target import TARGET

(IDS,) = random_ids([24])
Make = Callable[..., tuple[Graph, Artifact]]


@pytest.fixture
def packed(tmp_path: Path) -> Make:
    """A checkpoint with these options, captured and written as an artifact."""

    def make(*, float_copies: bool = False, **options: Any) -> tuple[Graph, Artifact]:
        source = tmp_path / "source"
        config = GPTQ | {"bits": options.get("bits", 4), "group_size": options.get("group", 32) or -1}
        checkpoint(source, gptq, config, num_hidden_layers=1, **options)
        graph = capture_directory(source)
        return graph, written(graph, source, tmp_path / "artifact", float_copies=float_copies)

    return make


def weights_of(graph: Graph) -> dict[str, Tensor]:
    return {module.name: module.float_weight() for module in modules(graph)}


def assert_same_weights(one: Graph, other: Graph) -> None:
    expected, given = weights_of(one), weights_of(other)
    assert expected.keys() == given.keys() and expected
    for name, weight in expected.items():
        assert torch.equal(given[name], weight), name


@pytest.mark.parametrize("tied", [False, True])
def test_an_artifact_with_codes_alone_exports_as_one_with_float_copies(tmp_path: Path, tied: bool) -> None:
    source, graph = int4_beside_int8_head(tmp_path, tied)
    found = []
    for float_copies in (False, True):
        artifact = written(graph, source, tmp_path / f"artifact-{float_copies}", float_copies=float_copies)
        out = tmp_path / f"export-{float_copies}"
        export(artifact, "hf", out)
        found.append({file.name: file.read_bytes() for file in out.iterdir()})
    assert found[0] == found[1] and "model.safetensors" in found[0]
    floats = captured("llama", tie_word_embeddings=tied)
    for module in modules(graph):
        floats.weights[f"{module.name}.weight"].value = module.float_weight()
    expected = dense(floats, IDS)
    torch.testing.assert_close(transformers_logits(tmp_path / "export-False"), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{"symmetric": False}, {"act_order": True}, {"group": 64}, {"bits": 8}])
def test_an_artifact_gives_the_same_graph_and_loads_in_transformers(
    packed: Make, options: dict[str, Any]
) -> None:
    pytest.importorskip("compressed_tensors")
    graph, artifact = packed(**options, float_copies=True)
    again = artifact.graph()
    assert_same_weights(graph, again)
    expected = dense(graph, IDS)
    assert torch.equal(dense(again, IDS), expected)
    size = expected.abs().max().item()
    given = transformers_logits(artifact.directory)
    torch.testing.assert_close(given, expected, atol=1e-3 * size, rtol=1e-3)


@pytest.mark.parametrize("options", [{"act_order": True}, {"group": 64}])
def test_layers_without_a_format_are_read_from_codes_alone(packed: Make, options: dict[str, Any]) -> None:
    graph, artifact = packed(**options)
    assert not (artifact.directory / "model.safetensors").exists()
    again = artifact.graph()
    assert_same_weights(graph, again)
    assert torch.equal(dense(again, IDS), dense(graph, IDS))


def test_the_tensors_are_those_of_the_library(packed: Make) -> None:
    """Keys, shapes and dtypes of every layer: what vLLM's loader, which uses the library's schemes, asks for."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    graph, artifact = packed(symmetric=False)
    config = json.loads((artifact.directory / "config.json").read_text())["quantization_config"]
    parsed = quantization.QuantizationConfig.model_validate(config)
    (scheme,) = parsed.config_groups.values()
    with safe_open(str(artifact.directory / "model.safetensors"), framework="pt") as stored:
        names = set(stored.keys())
        for module in modules(graph):
            own = {
                n.rpartition(".")[2]: stored.get_tensor(n) for n in names if n.startswith(module.name + ".")
            }
            expected = set(PackedQuantizationCompressor.compression_param_names(scheme))
            assert set(own) == expected
            weight = PackedQuantizationCompressor.decompress(own, scheme)["weight"]
            torch.testing.assert_close(weight.float(), module.float_weight(), atol=1e-3, rtol=1e-2)
            zero = (module.operands["weight_zero_point"].to(torch.int16) - 8).to(torch.int8)
            floats = {"weight": module.float_weight(), "weight_scale": own["weight_scale"]}
            made = PackedQuantizationCompressor.compress(floats | {"weight_zero_point": zero}, scheme)
            assert made.keys() == own.keys() and all(torch.equal(made[key], own[key]) for key in made)


@pytest.mark.skipif(
    Version(version("transformers")) < Version("5.23"),
    reason="Transformers 5.17 and before load it either way",
)
def test_why_transformers_is_told_to_dequantize_zero_points(packed: Make) -> None:
    """Without that it refuses what the library itself packs. When this fails, ``packs_zero_points`` can go."""
    pytest.importorskip("compressed_tensors")
    _, artifact = packed(symmetric=False)
    file = artifact.directory / "config.json"
    config = json.loads(file.read_text())
    assert config["quantization_config"].pop("dequantize") is True
    file.write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers_logits(artifact.directory)


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("gptq", {"symmetric": False, "act_order": True}),
        ("gptq", {"bits": 3}),
        ("awq", {"symmetric": False}),
        ("awq", {"symmetric": True}),
    ],
)
def test_export_and_back(packed: Make, tmp_path: Path, format: str, options: dict[str, Any]) -> None:
    graph, artifact = packed(**options)
    export(artifact, format, tmp_path / "out")
    again = capture_directory(tmp_path / "out")
    assert_same_weights(graph, again)
    assert torch.equal(dense(again, IDS, TARGET), dense(graph, IDS, TARGET))
    assert set(open_source(tmp_path / "out").layers) == set(weights_of(graph))


def test_export_as_plain_floats(packed: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph, artifact = packed(act_order=True, symmetric=False)
    out = tmp_path / "out"
    assert main.run(["export", str(artifact.directory), "--format", "hf", "--out", str(out)]) == 0
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    expected = dense(graph, IDS)
    torch.testing.assert_close(
        transformers_logits(out), expected, atol=1e-4 * expected.abs().max().item(), rtol=1e-4
    )


def artifact_of(tmp_path: Path, *passes: tuple[str, dict[str, Any]]) -> Artifact:

    tiny_model("llama").save_pretrained(tmp_path / "float")
    graph = captured("llama")
    for name, options in passes:
        apply(graph, name, **options)
    return written(graph, tmp_path / "float", tmp_path / "artifact")


@pytest.mark.parametrize(
    ("format", "passes", "reason"),
    [
        ("gptq", [("w4a8", {})], "float minimums"),
        ("awq", [("int8", {})], "8 bits"),
        ("gptq", [("int8", {"ignore": ["down_proj"]})], "not quantized"),
        ("gptq", [("w4a8", {"symmetric": True, "ignore": ["down_proj"]}), ("int8", {})], "has one of each"),
        ("gptq", [("int8", {"lm_head": True})], "output head"),
        ("gptq", [], "no layer is quantized"),
    ],
)
def test_what_a_format_cannot_express_is_refused(
    tmp_path: Path, format: str, passes: list[tuple[str, dict[str, Any]]], reason: str
) -> None:
    artifact, out = artifact_of(tmp_path, *passes), tmp_path / "out"
    with pytest.raises(UserError, match=reason):
        export(artifact, format, out)
    assert not out.exists() and not list(tmp_path.glob(".out*"))


def test_symmetric_int4_of_our_own_exports_to_awq(tmp_path: Path) -> None:
    artifact = artifact_of(tmp_path, ("fuse_qkv", {}), ("w4a8", {"symmetric": True}))
    export(artifact, "awq", tmp_path / "out")
    assert_same_weights(artifact.graph(), capture_directory(tmp_path / "out"))


def test_an_existing_directory_is_not_replaced(tmp_path: Path) -> None:
    artifact = artifact_of(tmp_path, ("int8", {}))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(UserError, match="exists"):
        export(artifact, "gptq", tmp_path / "out")
