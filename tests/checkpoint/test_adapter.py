"""Adapters are data from strangers: what is not a plain LoRA in safetensors is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optkit.checkpoint.adapter import read_adapter
from optkit.checkpoint.locate import ModelSource
from optkit.errors import UserError
from tests.support.adapters import linear_update, write_adapter

Q = "model.layers.0.self_attn.q_proj"


def refusal(directory: Path) -> str:
    with pytest.raises(UserError) as error:
        read_adapter(directory)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"peft_type": "IA3"}, "of type 'IA3'"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "'target_parameters' is set"),
        ({"lora_bias": True}, "'lora_bias' is set"),
        ({"a_later_option": 1}, "'a_later_option' is set"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the base model"),
        ({"r": 0}, "'r' must be a positive number"),
        ({"r": True}, "'r' must be a positive number"),
        ({"lora_alpha": "16"}, "'lora_alpha' must be a positive number"),
        ({"alpha_pattern": {"(a+)+$": 2}}, "has the pattern"),
        ({"alpha_pattern": {"q_proj": -2}}, "must be a positive number"),
        ({"rank_pattern": ["q_proj"]}, "'rank_pattern' must be a table"),
        ({"r": 8}, "its rank is 8"),
        ({"use_dora": True}, "lacks a tensor"),
    ],
)
def test_read_adapter_refuses_a_configuration_it_does_not_model(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    assert reason in refusal(write_adapter(tmp_path, {Q: linear_update(64, 64)}, **config))


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        ({"lora_A.weight": torch.zeros(4, 64)}, "lacks a tensor"),
        ({"lora_A.weight": torch.zeros(4, 64), "lora_B.weight": torch.zeros(64, 3)}, "its rank is 4"),
        (
            {"lora_A.weight": torch.full((4, 64), torch.nan), "lora_B.weight": torch.zeros(64, 4)},
            "no finite floats",
        ),
        (
            {name: value.to(torch.float8_e4m3fn) for name, value in linear_update(64, 64).items()},
            "no finite floats",
        ),
        ({"lora_C.weight": torch.zeros(4, 64)}, "of no kind that optkit merges"),
        (linear_update(64, 64) | {"lora_magnitude_vector": torch.ones(64)}, "lacks a tensor"),
    ],
)
def test_read_adapter_refuses_tensors_that_are_no_update(tmp_path: Path, update: Any, reason: str) -> None:
    assert reason in refusal(write_adapter(tmp_path, {Q: update}))


def test_read_adapter_refuses_no_tensors_and_two_for_a_parameter(tmp_path: Path) -> None:
    assert "there is no tensor" in refusal(write_adapter(tmp_path, {}))
    heads = {name: torch.zeros(128, 64) for name in ("lm_head.weight", "lm_head.modules_to_save.weight")}
    assert "replaced by two tensors" in refusal(write_adapter(tmp_path, {}, heads))


def test_read_adapter_refuses_a_pickle_without_opening_it(tmp_path: Path) -> None:
    write_adapter(tmp_path, {Q: linear_update(64, 64)})
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    assert "this is a pickle file" in refusal(tmp_path)


def test_read_adapter_names_what_is_missing(tmp_path: Path) -> None:
    assert "no adapter_config.json" in refusal(tmp_path) and "no adapter_config.json" in refusal(
        tmp_path / "none"
    )
    write_adapter(tmp_path, {Q: linear_update(64, 64)})
    (tmp_path / "adapter_model.safetensors").unlink()
    assert "no adapter_model.safetensors" in refusal(tmp_path)


def test_source_digest_follows_from_model_and_adapters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one, two = (write_adapter(tmp_path / name, {Q: linear_update(64, 64)}) for name in ("one", "two"))
    plain = ModelSource("tiny", tmp_path, "0" * 64)
    digests = [plain.with_adapters(paths).digest for paths in ([], [one], [two], [one, two])]
    assert digests[0] == plain.digest and len(set(digests)) == 4
    assert plain.with_adapters([one]).digest == digests[1]
    write_adapter(two, {Q: linear_update(64, 64)}, lora_alpha=8)
    assert plain.with_adapters([two]).digest != digests[2]
