"""Quantized experts on disk: the checkpoint's names, one module an expert, for transformers, vLLM and the runtime."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from optkit.artifact.export import export
from optkit.capture import capture_directory
from optkit.checkpoint.compressed_tensors_writer import PACKED_FILE
from optkit.checkpoint.modules import modules
from optkit.errors import UserError
from optkit.kernels import reference
from tests.checkpoint.test_compressed_tensors_writer import written
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, assert_origins_invert, dense, random_ids
from tests.support.target import TARGET

(IDS,) = random_ids([24])
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("int8", {"group_size": 32}),
    "w4a8": ("w4a8", {"symmetric": True}),
    "w4a8 minimums": ("w4a8", {}),
    "rtn": ("rtn", {"scheme": "W4A16_ASYM", "group_size": 32}),
}


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / request.param
    tiny_model(request.param, num_hidden_layers=1).save_pretrained(directory)
    return directory


def transformers_experts(directory: Path) -> dict[str, Tensor]:
    """The weights [N, K] of experts as transformers loads them, by module of the checkpoint."""
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    model._weight_conversions = None  # those of the architecture, without the dequantization on loading
    named = revert_weight_conversion(model, dict(model.named_parameters()))
    return {
        name.removesuffix(".weight"): value.detach() for name, value in named.items() if ".experts." in name
    }


def tensors_of(directory: Path) -> dict[str, Tensor]:
    with safe_open(str(directory / "model.safetensors"), framework="pt") as stored:
        return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping


@pytest.mark.parametrize("case", CASES)
def test_an_artifact_gives_the_same_graph_and_loads_in_transformers(
    source: Path, tmp_path: Path, case: str
) -> None:
    pytest.importorskip("compressed_tensors")
    graph = capture_directory(source)
    name, options = CASES[case]
    apply(graph, name, **options)
    artifact = written(graph, source, tmp_path / "artifact", float_copies=case == "w4a8 minimums")
    again = artifact.graph()
    expected = dense(graph, IDS)
    assert torch.equal(dense(again, IDS), expected)
    assert_origins_invert(again)
    for before, after in zip(modules(graph), modules(again), strict=True):
        assert before.name == after.name and torch.equal(before.float_weight(), after.float_weight())
    if case in ("int8", "rtn"):  # transformers 5.23 dequantizes symmetric packed experts only
        return
    weights = {module.name: module.float_weight() for module in modules(graph) if ".experts." in module.name}
    given = transformers_experts(artifact.directory)
    assert len(weights) == 12
    for module, weight in weights.items():
        torch.testing.assert_close(given[module].float(), weight, atol=1e-3, rtol=1e-2)


def test_an_artifact_keeps_both_variants_of_experts(source: Path, tmp_path: Path) -> None:
    """int4 for steps of up to 4 tokens, int8 for larger ones."""
    graph = capture_directory(source)
    apply(graph, "w4a8", max_tokens=4)
    apply(graph, "int8", group_size=32)
    again = written(graph, source, tmp_path / "artifact").graph()
    alone = capture_directory(source), capture_directory(source)
    apply(alone[0], "w4a8")
    apply(alone[1], "int8", group_size=32)
    for tokens, same in ((4, alone[0]), (5, alone[1])):
        expected = dense(same, IDS[:tokens], TARGET)
        assert torch.equal(dense(graph, IDS[:tokens], TARGET), expected)
        assert torch.equal(dense(again, IDS[:tokens], TARGET), expected)
    assert list(again.calls(reference.expert_w4a8)) and list(again.calls(reference.expert_w8a8))


@pytest.mark.parametrize("case", ["int8", "rtn"])
def test_a_checkpoint_with_quantized_experts_is_captured(source: Path, tmp_path: Path, case: str) -> None:
    """The directory as any compressed-tensors checkpoint: one module an expert becomes one weight of all experts."""
    graph = capture_directory(source)
    name, options = CASES[case]
    apply(graph, name, **options)
    artifact = written(graph, source, tmp_path / "artifact")
    shutil.rmtree(artifact.directory / "optkit")
    captured = capture_directory(artifact.directory)
    before, after = ({m.name: m for m in modules(each)} for each in (graph, captured))
    assert before.keys() == after.keys()
    for module, layer in before.items():
        assert torch.equal(layer.float_weight(), after[module].float_weight()), module
    if case == "rtn":  # both in float activations
        torch.testing.assert_close(dense(captured, IDS), dense(graph, IDS), atol=1e-4, rtol=1e-4)


def test_experts_quantized_in_part_are_refused(source: Path, tmp_path: Path) -> None:
    graph = capture_directory(source)
    apply(graph, "rtn", scheme="W4A16", group_size=32)
    directory = written(graph, source, tmp_path / "artifact").directory
    shutil.rmtree(directory / "optkit")
    tensors = tensors_of(directory)
    module = next(m for m in modules(graph) if ".experts.1." in m.name)
    for name in [name for name in tensors if name.startswith(f"{module.name}.")]:
        del tensors[name]
    tensors[f"{module.name}.weight"] = module.float_weight()
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["ignore"].append(module.name)
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="experts"):
        capture_directory(directory)


@pytest.mark.parametrize("format", ["hf", "gptq"])
def test_experts_of_one_tensor_are_stored_once_and_not_exported(tmp_path: Path, format: str) -> None:
    source = tmp_path / "source"
    tiny_model("gpt_oss").save_pretrained(source)
    graph = capture_directory(source)
    apply(graph, "w4a8")
    artifact = written(graph, source, tmp_path / "artifact")
    assert torch.equal(dense(artifact.graph(), IDS), dense(graph, IDS))
    with safe_open(str(artifact.directory / "optkit" / PACKED_FILE), framework="pt") as tensors:
        names = set(tensors.keys())
    assert {"model.layers.0.mlp.experts.gate_up_proj.weight_packed", "model.norm.weight"} <= names
    assert "model.layers.0.mlp.experts.gate_up_proj" not in names
    with pytest.raises(UserError, match="one tensor"):
        export(artifact, format, tmp_path / "out")
    assert not (tmp_path / "out").exists()
