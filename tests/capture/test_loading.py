"""A config or tensors that transformers can't make a model of are refused in one line, with a name or a value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optkit.capture.directory import capture_directory
from optkit.errors import UnsupportedModel
from tests.support.architectures import tiny_model

UP = "model.layers.1.mlp.up_proj.weight"
KEY = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and tensors of a tiny Llama."""
    directory = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    return config, load_file(directory / "model.safetensors")


def refusal(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], **options: Any) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel) as error:
        capture_directory(directory, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"]}, "`layer_types` (1)"),
        ({"rms_norm_eps": "small"}, "expected float, got str"),
        ({"rope_parameters": 7}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "nonesuch", "rope_theta": 1e4}}, "nonesuch"),
        ({"num_attention_heads": 0}, "zero"),
        ({"hidden_act": "nonesuch"}, "nonesuch"),
        ({"text_config": {"model_type": "llama"}}, "can't read its config"),
        ({"text_config": {"text_config": {"model_type": "llama"}}}, "can't read its config"),
    ],
)
def test_capture_names_the_value_when_transformers_refuses_the_config(
    llama: Any, tmp_path: Path, change: dict[str, Any], reason: str, weights: bool
) -> None:
    config, tensors = llama
    assert reason in refusal(tmp_path, config | change, tensors, weights=weights)


def test_capture_names_the_tensor_when_one_is_missing(llama: Any, tmp_path: Path) -> None:
    """transformers would go on with random numbers."""
    config, tensors = llama
    kept = {name: value for name, value in tensors.items() if name != KEY}
    assert f"no tensor for {KEY}" in refusal(tmp_path, config, kept)


def test_capture_names_both_shapes_when_they_contradict(llama: Any, tmp_path: Path) -> None:
    config, tensors = llama
    given = refusal(tmp_path, config, tensors | {UP: torch.zeros(95, 64)})
    assert f"{UP} is [95, 64] in the checkpoint, and [96, 64] by its config" in given
