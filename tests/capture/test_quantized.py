"""Captures of quantized checkpoints are checked as others are, whatever the size of their float weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from optkit.capture import boundary, capture_directory, export, quantized
from optkit.capture.quantized import load_model
from optkit.checkpoint.source import open_source
from optkit.errors import UnsupportedModel
from optkit.graph.ir import Graph
from optkit.kernels import reference
from tests.support.architectures import tiny_config
from tests.support.packers import checkpoint, gptq

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}


def damaged(rewrite: Any) -> Any:
    """``rewrite``, after which the first attention has another scale."""

    def wrong(graph: Graph) -> Graph:
        graph = rewrite(graph)
        node = next(graph.calls(reference.attention))
        node.kwargs = {**node.kwargs, "scale": node.kwargs["scale"] * 2}
        return graph

    return wrong


@pytest.mark.parametrize("most", [0, quantized.MAX_CHECKED_BYTES])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_wrong_capture_is_refused_whatever_its_size(
    architecture: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path, gptq, GPTQ, architecture=architecture)
    monkeypatch.setattr(quantized, "MAX_CHECKED_BYTES", most)
    graph = capture_directory(tmp_path)
    assert list(graph.calls(reference.linear_wna16)) and not list(graph.calls(reference.linear))[1:]
    monkeypatch.setattr(export, "canonicalize", damaged(export.canonicalize))
    with pytest.raises(UnsupportedModel, match="logits differ"):
        capture_directory(tmp_path)


def test_random_weight_takes_the_memory_of_a_row_and_a_column() -> None:
    weight = quantized.random_weight((40, 60), seed=3)
    assert weight.shape == (40, 60) and weight.untyped_storage().nbytes() == 4 * 99
    assert torch.linalg.matrix_rank(weight) == 40
    x = torch.randn(5, 60)
    torch.testing.assert_close(torch.nn.functional.linear(x, weight), x @ weight.contiguous().T)


# -- MXFP4 -------------------------------------------------------------------------------------------------


def mxfp4_directory(path: Path) -> dict[str, Tensor]:
    """A tiny gpt_oss checkpoint with packed experts in ``path``; gives the tensors of the file."""
    config = tiny_config(
        "gpt_oss", num_hidden_layers=1, layer_types=["full_attention"], head_dim=16, intermediate_size=32
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, k, n = tensors.pop(name).shape
        shape = (experts, n, k // 32)
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (*shape, 16), generator=generator, dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8)
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(path)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()},
        path / "model.safetensors",
        {"format": "pt"},
    )
    return tensors


def test_mxfp4_experts_become_the_parameters_of_the_model(tmp_path: Path) -> None:
    """Against transformers' own conversion of the packed tensors."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = mxfp4_directory(tmp_path)
    boundary.register()
    model = load_model(open_source(tmp_path))
    parameters = dict(model.named_parameters())
    packed = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
    assert len(packed) == 2
    for name in packed:
        expected = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        assert parameters[name].dtype is torch.float32 and torch.equal(parameters[name], expected.float())
    for name in set(parameters) & set(tensors):
        assert torch.equal(parameters[name], tensors[name].float()), name
