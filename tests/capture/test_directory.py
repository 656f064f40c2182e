"""Capture of a checkpoint directory: the logits of transformers' own loader, and the same graph without weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optkit.capture.directory import capture_directory
from optkit.errors import UnsupportedModel
from tests.support.graphs import dense
from tests.support.model_directory import save_model
from tests.support.small_runs import IDS, transformers_logits


def test_capture_directory_has_the_logits_of_transformers(tmp_path: Path) -> None:
    graph = capture_directory(save_model(tmp_path))
    torch.testing.assert_close(dense(graph, IDS), transformers_logits(tmp_path, IDS), atol=1e-4, rtol=1e-4)


def test_capture_directory_without_weights_has_the_same_ops_and_shapes(tmp_path: Path) -> None:
    save_model(tmp_path)
    whole = capture_directory(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    empty = capture_directory(tmp_path, weights=False)
    assert [(n.op, str(n.target)) for n in empty.fx.nodes] == [(n.op, str(n.target)) for n in whole.fx.nodes]
    assert {name: w.value.shape for name, w in empty.weights.items()} == {
        name: w.value.shape for name, w in whole.weights.items()
    }
    assert {w.value.device.type for w in empty.weights.values()} == {"meta"}


def test_capture_directory_names_the_model_type_that_transformers_does_not_know(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nobody", "num_hidden_layers": 1}')
    with pytest.raises(UnsupportedModel, match="nobody"):
        capture_directory(tmp_path, weights=False)
