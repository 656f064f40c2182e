"""fp8: how close, what it stores, and that compressed-tensors and a reader of its layout see the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from optkit.capture import capture_directory
from optkit.checkpoint.modules import modules
from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_to_json
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.machine.target import DATASHEETS
from optkit.passes.base import PassContext
from optkit.passes.fp8 import FP8, FP8Config, quantize_fp8
from tests.checkpoint.test_compressed_tensors_writer import transformers_logits, written
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, captured, dense, random_ids
from tests.support.target import TARGET

(IDS,) = random_ids([24])
SCHEMES = ["FP8_DYNAMIC", "FP8"]


def quantized(scheme: str, **options: object) -> Graph:
    graph = captured("llama")
    apply(graph, "fuse_qkv")
    apply(graph, "fp8", scheme=scheme, **options)
    verify(graph)
    return graph


@pytest.mark.parametrize("scheme", SCHEMES)
def test_close_to_float_and_a_quarter_of_the_bytes(scheme: str) -> None:
    graph, source = quantized(scheme), captured("llama")
    expected = dense(source, IDS)
    error = float((dense(graph, IDS) - expected).norm() / expected.norm())
    assert 1e-3 < error < 0.2
    assert torch.equal(dense(graph, IDS, TARGET), dense(graph, IDS, TARGET))
    linear = sum(m.columns * m.shape[0] for m in modules(graph))
    assert source.num_bytes() - graph.num_bytes() > 2.8 * linear


def test_weights_are_rounded_to_the_nearest_e4m3_value() -> None:
    weight = torch.randn(7, 40) * torch.logspace(-3, 3, 7)[:, None]
    weight[3] = 0
    values, scale = quantize_fp8(weight)
    error = (reference.dequantize_fp8(values, scale) - weight).abs()
    assert bool(
        (error <= weight.abs() * 2.0**-4 + scale * 2.0**-10).all()
    )  # 3 bits of mantissa, or subnormal
    assert bool((values.float().abs().amax(1)[[0, 6]] == 448).all()) and not error[3].any()


def test_static_scales_come_from_the_calibration_text_and_saturate() -> None:
    graph = quantized("FP8")
    scales = [w.value for name, w in graph.weights.items() if name.endswith("input_scale")]
    assert scales and all(s.shape == (1,) and 0 < s.item() < 10 for s in scales)
    x, weight = torch.tensor([[1e6, 1.0]]), torch.tensor([[1.0, 1.0]]).to(torch.float8_e4m3fn)
    ones = torch.ones(1, 1)
    out = reference.linear_fp8(x, weight, ones, torch.ones(1), activations="tensor")
    assert out.item() == 449


@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_disk_it_is_float_quantized(scheme: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor

    tiny_model("llama").save_pretrained(tmp_path / "source")
    graph = quantized(scheme)
    artifact = written(graph, tmp_path / "source", tmp_path / "out")
    assert graph_to_json(artifact.graph()) == graph_to_json(graph)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (described,) = quantization.QuantizationConfig.model_validate(config).config_groups.values()
    assert config["format"] == "float-quantized" and described.input_activations.dynamic == (
        scheme == "FP8_DYNAMIC"
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for module in modules(graph):
        own = {k: stored[f"{module.name}.{k}"] for k in ("weight", "weight_scale")}
        assert set(FloatQuantizationCompressor.compression_param_names(described)) == set(own)
        weight = FloatQuantizationCompressor.decompress(own, described)["weight"]
        torch.testing.assert_close(weight.float(), module.float_weight())
    again = capture_directory(tmp_path / "out")
    assert torch.equal(dense(again, IDS), dense(graph, IDS))


def test_transformers_loads_it(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    tiny_model("llama").save_pretrained(tmp_path / "source")
    graph = quantized("FP8_DYNAMIC", lm_head=True)
    written(graph, tmp_path / "source", tmp_path / "out")
    expected = dense(graph, IDS)
    error = (transformers_logits(tmp_path / "out") - expected).norm() / expected.norm()
    loss = (dense(captured("llama"), IDS) - expected).norm() / expected.norm()
    assert error < 0.5 * loss


def test_a_gpu_without_float8_is_refused() -> None:
    with pytest.raises(UserError, match="cuda-a100 has no float8"):
        FP8(FP8Config()).check(captured("llama"), PassContext(DATASHEETS["cuda-a100"]))
    assert FP8(FP8Config()).check(captured("llama"), PassContext(DATASHEETS["cuda-h100"])).sites
