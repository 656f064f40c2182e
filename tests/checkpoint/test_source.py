"""Quantized checkpoints run as they are: the graph's logits are those of the float model that they stand for."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from optkit.capture import capture_directory
from optkit.checkpoint.source import open_source
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_from_json, graph_to_json
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.lowering.lower import lower
from optkit.passes.rewriting.stack import site_name
from tests.support.graphs import dense, random_ids
from tests.support.packers import awq, checkpoint, compressed, gptq, quantized
from tests.support.target import TARGET

(IDS,) = random_ids([21])
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS[None], use_cache=False).logits[0]


def agree(directory: Path, model: Any, ops: tuple[Any, ...] = (reference.linear_wna16,)) -> Graph:
    """Capture; the reference and this machine's kernels give the model's logits."""
    graph = capture_directory(directory)
    verify(graph)
    assert len(list(graph.calls(*ops))) >= 2 * 4
    left = {site_name(graph, node) for node in graph.calls(reference.linear)}
    assert left == {graph.meta.output_embedding}
    expected = logits_of(model)
    size = expected.abs().max().item()
    torch.testing.assert_close(dense(graph, IDS), expected, atol=2e-5 * size, rtol=1e-4)
    torch.testing.assert_close(dense(graph, IDS, TARGET), expected, atol=1e-3 * size, rtol=1e-3)
    return graph


def layer_of(
    directory: Path, pack: Any, config: dict[str, Any], shape: tuple[int, int] = (48, 96), **options: Any
):
    """One layer in a checkpoint of its own, read back; and the layer in plain numbers."""
    plain = quantized(*shape, **({"bits": 4, "group": 32, "symmetric": True, "act_order": False, "seed": 3,
                                  "dtype": torch.float16} | options))  # fmt: skip
    save_file({f"a.b.{key}": value for key, value in pack(plain).items()}, directory / "model.safetensors")
    text = json.dumps({"model_type": "llama", "quantization_config": config})
    (directory / "config.json").write_text(text)
    return open_source(directory).layers["a.b"], plain


BITS_AND_GROUPS = [
    {"symmetric": True},
    {"symmetric": False},
    {"symmetric": False, "act_order": True},
    {"group": 0},
    {"group": 64},  # a short last group
    {"bits": 2, "symmetric": False},
    {"bits": 3, "act_order": True},
    {"bits": 8, "symmetric": False, "dtype": torch.float32},
    {"dtype": torch.bfloat16},
]


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("options", BITS_AND_GROUPS)
def test_gptq_layers(tmp_path: Path, version: str, options: dict[str, Any]) -> None:
    config = GPTQ | {
        "checkpoint_format": version,
        "bits": options.get("bits", 4),
        "group_size": options.get("group", 32) or -1,
        "sym": options.get("symmetric", True),
        "desc_act": options.get("act_order", False),
    }
    layer, plain = layer_of(tmp_path, partial(gptq, version=version), config, **options)
    torch.testing.assert_close(layer.float_weight(), plain.weight())
    assert ("weight_zero_point" not in layer.operands) == options.get("symmetric", True)
    assert ("weight_g_idx" not in layer.operands) != options.get("act_order", False)


def test_gptq_layers_may_have_bits_of_their_own(tmp_path: Path) -> None:
    config = GPTQ | {"bits": 4, "group_size": 128, "dynamic": {"+:a": {"bits": 8, "group_size": 32}}}
    layer, plain = layer_of(tmp_path, gptq, config, bits=8)
    torch.testing.assert_close(layer.float_weight(), plain.weight())


@pytest.mark.parametrize("group", [32, 0])
def test_awq_layers(tmp_path: Path, group: int) -> None:
    layer, plain = layer_of(tmp_path, awq, AWQ | {"group_size": group or -1}, symmetric=False, group=group)
    torch.testing.assert_close(layer.float_weight(), plain.weight())


def ct_config(
    weights: dict[str, Any], format: str, activations: dict[str, Any] | None = None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "dynamic": False, **weights}}
    group |= {"input_activations": activations, "format": format}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize("options", [o for o in BITS_AND_GROUPS if o.get("group") != 64])
def test_pack_quantized_layers(tmp_path: Path, options: dict[str, Any]) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    group = options.get("group", 32)
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {"num_bits": options.get("bits", 4), "symmetric": options.get("symmetric", True), **strategy}
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**weights)
    )
    pack = partial(by_library, scheme=scheme, act_order=bool(options.get("act_order")))
    layer, plain = layer_of(tmp_path, pack, ct_config(weights, "pack-quantized"), **options)
    torch.testing.assert_close(layer.float_weight(), plain.weight(), atol=1e-3, rtol=1e-2)
    if options.get("dtype") is None:
        torch.testing.assert_close(layer.float_weight(), plain.weight())


@pytest.mark.parametrize(
    ("architecture", "pack", "config", "options"),
    [
        ("llama", gptq, GPTQ | {"desc_act": True, "sym": False}, {"act_order": True, "symmetric": False}),
        ("llama", awq, AWQ, {"symmetric": False}),
        ("qwen2", gptq, GPTQ | {"bits": 8}, {"bits": 8, "symmetric": False, "dtype": torch.float32}),
        ("gpt2", gptq, GPTQ | {"group_size": -1}, {"group": 0}),
    ],
)
def test_whole_models(
    tmp_path: Path, architecture: str, pack: Any, config: dict[str, Any], options: dict[str, Any]
) -> None:
    agree(tmp_path, checkpoint(tmp_path, pack, config, architecture=architecture, **options))


def by_library(layer: Any, scheme: Any, act_order: bool) -> dict[str, torch.Tensor]:
    """The library's tensors; with act-order, which its newest versions no longer write, as older ones wrote it."""
    if not act_order:
        return compressed(layer, scheme)
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    middle = 1 << (layer.bits - 1)
    packed = compressed(layer, scheme)
    packed["weight_packed"] = pack_to_int32(torch.from_numpy(layer.codes - middle).to(torch.int8), layer.bits)
    return packed


def test_a_graph_of_packed_layers_is_saved_and_read_back(tmp_path: Path) -> None:
    checkpoint(tmp_path, gptq, GPTQ | {"desc_act": True}, act_order=True, symmetric=False)
    graph, source = capture_directory(tmp_path), open_source(tmp_path)
    text = graph_to_json(graph)

    def load(name: str, origin: Any, dtype: torch.dtype) -> torch.Tensor:
        return source[origin.parts[0].name].to(dtype) if origin else graph.weights[name].value

    again = graph_from_json(text, load)
    assert torch.equal(dense(again, IDS), dense(graph, IDS))
    assert any(kernel == "native" for kernel in lower(again, TARGET).kernels.values())


def test_bytes_in_memory_are_those_of_the_codes(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, gptq, GPTQ, group=32)
    graph = capture_directory(tmp_path)
    linear = sum(m.weight.numel() for n, m in model.named_modules() if "proj" in n)
    floats = sum(p.numel() * 4 for n, p in model.named_parameters() if "proj" not in n)
    assert graph.num_bytes() - floats < linear * (0.5 + 2 / 32) + 1000
