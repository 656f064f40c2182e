"""Tensors of checkpoint files in memory."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from optkit.checkpoint.tensors import TensorFiles, load_tensors
from optkit.checkpoint.validate import validate_checkpoint


@pytest.mark.parametrize("shift", range(4))
def test_tensors_are_aligned_when_the_header_has_any_length(tmp_path: Path, shift: int) -> None:
    """A header of any length is valid: what follows it begins at any byte of the file."""
    value = torch.arange(9, dtype=torch.float32)
    header = {"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + shift)
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + value.numpy().tobytes())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for tensor in (load_tensors(file)["x"], TensorFiles(tmp_path, validate_checkpoint(tmp_path))["x"]):
        assert tensor.data_ptr() % 4 == 0
        assert torch.equal(tensor, value)
