"""Tensors that contradict the config, or are not finite, are refused in one line, before the model takes memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optkit import errors
from optkit.capture import building
from optkit.capture.directory import capture_directory
from optkit.errors import UnsupportedModel
from tests.support.architectures import tiny_model
from tests.support.refused_checkpoints import Checkpoint, refusal, tiny_checkpoint

UP = "model.layers.1.mlp.up_proj.weight"
KEY = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def test_capture_names_the_tensor_when_one_is_missing(llama: Any, tmp_path: Path) -> None:
    """transformers would go on with random numbers."""
    config, tensors = llama
    kept = {name: value for name, value in tensors.items() if name != KEY}
    assert f"no tensor for {KEY}" in refusal(tmp_path, config, kept)


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Config and tensors of a tiny model with 4 experts a layer, one tensor an expert."""
    return tiny_checkpoint(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe")


EXPERT = "model.layers.1.mlp.experts.3."


@pytest.mark.parametrize("projections", [["up_proj"], ["down_proj"], ["gate_proj", "up_proj", "down_proj"]])
def test_capture_names_tensor_and_file_when_one_of_an_expert_is_missing(
    qwen3_moe: Any, tmp_path: Path, projections: list[str]
) -> None:
    config, tensors = qwen3_moe
    gone = [f"{EXPERT}{projection}.weight" for projection in projections]
    assert set(gone) <= set(tensors)
    line = refusal(tmp_path, config, {name: value for name, value in tensors.items() if name not in gone})
    assert f"{tmp_path / 'model.safetensors'}: the tensor {EXPERT}" in line and "is missing" in line
    assert any(name in line for name in gone)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("number", [0, 5])
def test_capture_refuses_a_number_of_experts_that_a_token_can_not_have(
    qwen3_moe: Any, tmp_path: Path, number: int, weights: bool
) -> None:
    config, tensors = qwen3_moe
    line = refusal(tmp_path, config | {"num_experts_per_tok": number}, tensors, weights=weights)
    assert f"num_experts_per_tok is {number}, and must be from 1 to num_experts (4)" in line


def test_capture_names_both_shapes_when_they_contradict(llama: Any, tmp_path: Path) -> None:
    config, tensors = llama
    given = refusal(tmp_path, config, tensors | {UP: torch.zeros(95, 64)})
    assert f"{UP} is [95, 64] in the checkpoint, and [96, 64] by its config" in given


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": 400}, "has no tensor for model.layers.10.input_layernorm.weight"),
        ({"vocab_size": 1 << 21}, "in the checkpoint, and [2097152, 64] by its config"),
    ],
)
def test_capture_takes_no_memory_for_a_model_far_larger_than_its_checkpoint(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], reason: str
) -> None:
    """transformers would take memory for every parameter, and compare names and shapes afterwards."""
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", lambda *given, **options: pytest.fail("loaded"))
    config, tensors = llama
    config = {key: value for key, value in config.items() if key != "layer_types"} | change
    assert reason in refusal(tmp_path, config, tensors)


@pytest.mark.parametrize("failure", ["an error", "a conversion of values"])
def test_capture_compares_sizes_when_tensors_can_not_be_compared_by_their_headers(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    config, tensors = llama
    compare = building.convert_and_load_state_dict_in_model

    def fail(*given: Any) -> Any:
        if failure == "an error":
            raise NotImplementedError("Cannot copy out of meta tensor")
        report, offloaded = compare(*given)
        report.conversion_errors[KEY] = "Cannot copy out of meta tensor"
        return report, offloaded

    monkeypatch.setattr(building, "convert_and_load_state_dict_in_model", fail)
    line = refusal(tmp_path, config | {"vocab_size": 1 << 15}, tensors)
    assert re.search(r"a model with [\d,]{9} parameters, the checkpoint has [\d,]{6,7}\. take config", line)
    assert "is [95, 64] in the checkpoint" in refusal(tmp_path, config, tensors | {UP: torch.zeros(95, 64)})


def test_capture_accepts_a_checkpoint_with_one_of_two_tied_tensors(tmp_path: Path) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        tensors[name] = tensors.pop("model.embed_tokens.weight")
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        assert capture_directory(tmp_path).weights


def test_capture_accepts_a_checkpoint_without_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {k.removeprefix("transformer."): v for k, v in tensors.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    assert capture_directory(tmp_path).weights


def test_capture_passes_on_that_memory_is_missing(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no fault of the model."""
    from transformers import LlamaForCausalLM

    def fail(*given: Any, **options: Any) -> Any:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")

    config, tensors = llama
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for method in ("from_pretrained", "forward"):
        with monkeypatch.context() as patch:
            patch.setattr(LlamaForCausalLM, method, fail)
            with pytest.raises(RuntimeError) as error:
                capture_directory(tmp_path)
        assert str(errors.refusal(error.value)).startswith("not enough memory: ")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_capture_refuses_a_value_that_is_not_finite_wherever_it_is(
    llama: Any, tmp_path: Path, name: str, value: float
) -> None:
    """No token of the check may have the row."""
    config, tensors = llama
    broken = tensors[name].clone()
    broken.view(-1)[-2] = value
    assert f"the weight {name} has values that are NaN" in refusal(tmp_path, config, tensors | {name: broken})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_value_that_is_not_finite_is_found_at_every_place(dtype: torch.dtype) -> None:
    weight = torch.randn(5, 67, generator=torch.Generator().manual_seed(0)).to(dtype)
    for values in (weight, weight.T, weight[:0]):
        building.refuse_not_finite("w", values, "there")
    for place in range(weight.numel()):
        broken = weight.float()
        broken.view(-1)[place] = float("nan")
        with pytest.raises(UnsupportedModel, match="there: the weight w has"):
            building.refuse_not_finite("w", broken.to(dtype), "there")


def test_a_layer_beyond_the_config_is_named_in_a_note(llama: Checkpoint, tmp_path: Path) -> None:
    config, tensors = llama
    extra = {name.replace("layers.1.", "layers.2."): value.clone() for name, value in tensors.items()}
    for directory, stored in ((tmp_path / "more", extra | tensors), (tmp_path / "same", tensors)):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        save_file(stored, directory / "model.safetensors", {"format": "pt"})
    (note,) = capture_directory(tmp_path / "more").notes
    assert note.endswith("tensors of the checkpoint, such as model.layers.2.input_layernorm.weight")
    assert not capture_directory(tmp_path / "same").notes
