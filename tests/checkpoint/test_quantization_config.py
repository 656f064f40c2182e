"""``quantization_config``: the compressed-tensors library reads the scheme of each layer that the graph has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optkit.checkpoint.quantization_config import quantization_config, quantized_modules
from optkit.graph.ir import Graph
from tests.support.graphs import apply, captured

ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def quantized(*passes: tuple[str, dict[str, Any]]) -> Graph:
    graph = captured("llama")
    for name, options in passes:
        apply(graph, name, **options)
    return graph


def modules_of(names: list[str]) -> set[str]:
    return {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in names}


def schemes(graph: Graph) -> dict[str, Any]:
    """The scheme of each linear module, as the library finds it; None for an ignored one."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.utils.match import is_match

    config = quantization.QuantizationConfig.model_validate(quantization_config(graph))
    linear, found = torch.nn.Linear(1, 1), {}
    for name in [*sorted(modules_of(ATTENTION + MLP)), "lm_head"]:
        groups = [s for s in config.config_groups.values() if is_match(name, linear, s.targets)]
        by_name = [scheme for scheme in groups if name in scheme.targets]
        found[name] = None if name in config.ignore else (by_name or groups)[0]
    return found


def test_float_graph_has_no_quantization_config() -> None:
    assert quantization_config(captured("llama")) is None
    assert quantized_modules(captured("llama")) == set()


@pytest.mark.parametrize("fused", [False, True])
def test_library_reads_int8_and_packed_layers_and_ignores_the_float_ones(fused: bool) -> None:
    fusions = [("fuse_qkv", {}), ("fuse_gate_up", {})] if fused else []
    graph = quantized(
        *fusions,
        ("w4a8", {"symmetric": True, "ignore": ["re:.*self_attn.*"]}),
        ("int8", {"ignore": ["re:.*o_proj"]}),
    )
    assert quantized_modules(graph) == modules_of(ATTENTION[:3] + MLP)
    found = schemes(graph)
    for name in modules_of(ATTENTION[:3]):
        weights, inputs = found[name].weights, found[name].input_activations
        assert (weights.num_bits, weights.strategy, weights.symmetric) == (8, "channel", True)
        assert (inputs.num_bits, inputs.strategy, inputs.dynamic) == (8, "token", True)
        assert found[name].format == "int-quantized"
    for name in modules_of(MLP):
        weights = found[name].weights
        assert (weights.num_bits, weights.strategy, weights.symmetric) == (4, "group", True)
        assert found[name].input_activations is None and found[name].format == "pack-quantized"
    assert {name for name, scheme in found.items() if scheme is None} == modules_of(ATTENTION[3:]) | {
        "lm_head"
    }
    described = quantization_config(graph)
    assert described is not None and described["format"] == "mixed-precision"
    assert described["config_groups"]["group_0"]["targets"] == ["Linear"]  # int8 first
    assert "dequantize" not in described


@pytest.mark.parametrize(
    ("scheme", "bits", "size", "symmetric"),
    [("W4A16", 4, 32, True), ("W8A16_ASYM", 8, 32, False), ("W3A16", 3, 16, True)],
)
def test_library_reads_bits_groups_and_zero_points(
    scheme: str, bits: int, size: int, symmetric: bool
) -> None:
    graph = quantized(("rtn", {"scheme": scheme, "group_size": size}))
    for name, found in schemes(graph).items():
        if name == "lm_head":
            assert found is None
        else:
            assert (found.weights.num_bits, found.weights.group_size) == (bits, size)
            assert (found.weights.symmetric, found.input_activations) == (symmetric, None)
    described = quantization_config(graph)
    assert described is not None and described["format"] == "pack-quantized"
    assert described.get("dequantize", False) is not symmetric


def test_library_reads_float8_layers_with_activations_of_a_token() -> None:
    graph = quantized(("fp8", {}))
    found = schemes(graph)["model.layers.1.mlp.up_proj"]
    assert (found.weights.type, found.weights.num_bits, found.format) == ("float", 8, "float-quantized")
    assert (found.input_activations.type, found.input_activations.strategy) == ("float", "token")


def test_layers_without_a_stored_format_are_ignored() -> None:
    graph = quantized(("w4a8", {"symmetric": False, "ignore": MLP[:2]}), ("int8", {}))  # float minimums
    described = quantization_config(graph)
    assert described is not None and described["format"] == "int-quantized"
    assert set(described["ignore"]) == modules_of([*ATTENTION, MLP[2]]) | {"lm_head"}


def test_tied_head_is_ignored_by_its_own_name() -> None:
    graph = captured("llama", tie_word_embeddings=True)
    apply(graph, "int8")
    described = quantization_config(graph)
    assert described is not None and described["ignore"] == ["lm_head"]
