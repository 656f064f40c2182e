"""MXFP4: every code and scale by hand, transformers' own conversion, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from optkit.checkpoint.mxfp4 import dequantize
from optkit.checkpoint.source import open_source
from optkit.errors import UserError

NAME = "model.layers.0.mlp.experts.down_proj"


def packed(seed: int = 0, experts: int = 2, n: int = 6, groups: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, n, groups, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 150, (experts, n, groups), generator=generator, dtype=torch.uint8)
    return {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}


def directory(path: Path, tensors: dict[str, Tensor]) -> Path:
    config = {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 1,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]},
    }
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def value(code: int) -> float:
    """E2M1 by its definition: exponent bias 1, one bit of mantissa, subnormals without the leading 1."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def test_every_code_and_scale_is_exact() -> None:
    """All 256 bytes with scales from the least to the largest whose products bfloat16 holds."""
    scales = torch.tensor([1, 3, 100, 127, 128, 200, 252], dtype=torch.uint8).view(1, -1, 1).repeat(1, 1, 16)
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 7, 16, 16)
    found = dequantize(blocks.contiguous(), scales)
    assert found.dtype is torch.bfloat16 and found.shape == (1, 512, 7)
    for column, scale in enumerate(scales[0, :, 0].tolist()):
        expected = [value(c) * 2.0 ** (scale - 127) for byte in range(256) for c in (byte & 15, byte >> 4)]
        assert found[0, :, column].double().tolist() == expected


def test_tensors_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = packed()
    source = open_source(directory(tmp_path, tensors))
    assert source.names() == {NAME} and not source.layers
    expected = convert_moe_packed_tensors(tensors[f"{NAME}_blocks"], tensors[f"{NAME}_scales"])
    assert torch.equal(source[NAME], expected) and source.float4.shape(NAME) == tuple(expected.shape)


@pytest.mark.parametrize("kind", ["no scales", "other shape", "other dtype", "NaN"])
def test_damaged_tensors_are_refused(tmp_path: Path, kind: str) -> None:
    tensors = packed()
    name = f"{NAME}_scales"
    if kind == "no scales":
        del tensors[name]
    elif kind == "other shape":
        tensors[name] = tensors[name][:, :, :2].contiguous()
    elif kind == "other dtype":
        tensors[name] = tensors[name].to(torch.int32)
    else:
        tensors[name][1, 2, 0] = 255
    with pytest.raises(UserError, match="scales"):
        open_source(directory(tmp_path, tensors))[NAME]
