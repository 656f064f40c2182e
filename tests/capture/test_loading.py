"""A config or tensors that transformers can't make a model of are refused in one line, with a name or a value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.refused_checkpoints import Checkpoint, refusal, tiny_checkpoint


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"]}, "`layer_types` (1)"),
        ({"rms_norm_eps": "small"}, "expected float, got str"),
        ({"rope_parameters": 7}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "nonesuch", "rope_theta": 1e4}}, "nonesuch"),
        ({"num_attention_heads": 0}, "zero"),
        ({"model_type": "nonesuch"}, "does not know the model type 'nonesuch'"),
        ({"hidden_act": "nonesuch"}, "nonesuch"),
        (
            {"hidden_act": "odd"},
            "config.json: transformers {} does not know the value 'odd' of 'hidden_act'. correct",
        ),
        (
            {"dtype": "odd"},
            "config.json: transformers {} does not know the value 'odd' of 'dtype'. correct it",
        ),
        (
            {"rope_parameters": {"rope_type": "odd", "rope_theta": 1e4}},
            "config.json: transformers {} does not know the value 'odd' of 'rope_type'. correct it",
        ),
        ({"text_config": {"model_type": "llama"}}, "can't read its config"),
        ({"text_config": {"text_config": {"model_type": "llama"}}}, "can't read its config"),
    ],
)
def test_capture_names_the_value_when_transformers_refuses_the_config(
    llama: Any, tmp_path: Path, change: dict[str, Any], reason: str, weights: bool
) -> None:
    config, tensors = llama
    line = refusal(tmp_path, config | change, tensors, weights=weights)
    assert reason.format(transformers.__version__) in line
