"""Half precision is rounding alone, and what kernels want in float32 stays."""

from __future__ import annotations

import pytest
import torch

from optkit.graph.ops import op_name
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.lowering.dense import dense_inputs
from optkit.lowering.gpu_rewrites import rewrite
from optkit.lowering.lower import lower
from optkit.lowering.precision import narrow
from tests.lowering.test_gpu_rewrites import H200, error, fused, prompt
from tests.support.architectures import SPECIFIC
from tests.support.graphs import captured, dense

HALF = ("llama", "gemma2", "gpt2", "phi", "mixtral", "cohere2", "granite", "opt")


@pytest.mark.parametrize("name", HALF)
def test_half_precision_is_rounding(name: str) -> None:
    """A float32 model and itself in float16: logits differ by what half precision rounds, and are float32."""
    graph = captured(name)
    expected = dense(graph, prompt())
    model = lower(graph, H200, device="cpu", dtype=torch.float16)
    logits = model(dense_inputs([37], prompt(), model.kv_specs))
    assert {spec.dtype for spec in model.kv_specs} == {"float16"}
    assert logits.dtype == torch.float32
    assert 1e-7 < error(logits, expected) < 2e-2


def test_what_kernels_want_in_float32_stays() -> None:
    graph = fused("fp8")
    rewrite(graph, H200)
    narrow(graph, torch.bfloat16)
    verify(graph, lowered=True)
    for node in graph.fx.nodes:
        if op_name(node.target) in ("rms_norm_quantize", "add_rms_norm_quantize", "add_rms_norm"):
            position = 1 if node.target is reference.rms_norm_quantize else 2
            assert graph.weight_of(node.args[position]).value.dtype == torch.float32
        if node.target is reference.linear_fp8_rowwise:
            assert node.kwargs["dtype"] == "bfloat16"
            assert graph.weight_of(node.args[3]).value.dtype == torch.float32
    assert graph.weights["lm_head.weight.bfloat16"].value.dtype == torch.bfloat16
    assert "lm_head.weight" not in graph.weights


def test_a_tied_head_is_rounded_once() -> None:
    graph = captured("gemma2")
    narrow(graph, torch.bfloat16)
    wide = [w for w in graph.weights.values() if w.value.ndim == 2 and w.value.dtype == torch.float32]
    assert not wide
    assert (
        sum(w.value.shape == (128, 64) and w.value.dtype == torch.bfloat16 for w in graph.weights.values())
        == 1
    )


def test_every_architecture_has_the_types_of_its_ops() -> None:
    assert set(HALF) <= set(SPECIFIC)
    for name in ("qwen3", "olmo2", "glm4", "phi3"):
        graph = captured(name)
        narrow(graph, torch.bfloat16)
        verify(graph, lowered=True)
