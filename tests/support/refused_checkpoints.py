"""Tiny checkpoints with something wrong, which capture refuses."""

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

Checkpoint = tuple[dict[str, Any], dict[str, torch.Tensor]]


def tiny_checkpoint(directory: Path, model_type: str) -> Checkpoint:
    """Config and tensors of a tiny model."""
    tiny_model(model_type).save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    return config, load_file(directory / "model.safetensors")


def refusal(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], **options: Any) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel) as error:
        capture_directory(directory, **options)
    assert "\n" not in str(error.value)
    return str(error.value)
