"""Captures of quantized checkpoints are checked as others are, whatever the size of their float weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optkit.capture import capture_directory, export, quantized
from optkit.errors import UnsupportedModel
from optkit.graph.ir import Graph
from optkit.kernels import reference
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
