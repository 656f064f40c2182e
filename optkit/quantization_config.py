"""``quantization_config`` of config.json: compressed-tensors' description of a graph's quantized layers.

int8 layers are ``int-quantized``, symmetric int4 ones ``pack-quantized``. With only one of them the group takes all
linear layers but those it ignores; with both, each names its modules. The int4 group says nothing of activations:
who reads the directory multiplies in float, closer to the source than the int8 activations of optkit's runtime, and by
kernels that exist everywhere.
"""

from __future__ import annotations

from typing import Any

from optkit.graph.ir import Graph
from optkit.int4_layout import int4_modules
from optkit.kernels import reference


def quantization_config(graph: Graph) -> dict[str, Any] | None:
    """The description, or None where nothing is stored quantized."""
    groups = config_groups(graph)
    if not groups:
        return None
    left = modules(graph, reference.linear, 1)
    left += [module.name for module in int4_modules(graph) if module.minimum is not None]
    return {
        "quant_method": "compressed-tensors",
        "format": groups[0]["format"] if len(groups) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": sorted(set(left)),
    }


def config_groups(graph: Graph) -> list[dict[str, Any]]:
    """One group for all int8 layers, one for each group size of int4 layers."""
    groups = []
    int8 = modules(graph, reference.linear_w8a8, 2)
    if int8:
        groups.append({"targets": sorted(int8), **int8_scheme(int8_group_size(graph))})
    int4 = [module for module in int4_modules(graph) if module.minimum is None]
    for size in sorted({module.group_size for module in int4}):
        names = sorted(module.name for module in int4 if module.group_size == size)
        groups.append({"targets": names, **int4_scheme(size)})
    if len(groups) == 1:
        groups[0]["targets"] = ["Linear"]
    return groups


def quantized_modules(graph: Graph) -> set[str]:
    """Modules whose weight is quantized in the graph, however it is stored."""
    return {*modules(graph, reference.linear_w8a8, 2), *(module.name for module in int4_modules(graph))}


def modules(graph: Graph, op: Any, position: int) -> list[str]:
    """Checkpoint modules whose weight is argument ``position`` of an ``op``, fused ones spelled out."""
    names = []
    for node in graph.calls(op):
        weight = graph.weight_of(node.args[position])
        if weight is None or weight.origin is None:
            continue
        tied = str(node.args[position].target) == graph.meta.input_embedding
        parts = [part.name.rpartition(".")[0] for part in weight.origin.parts]
        names += [graph.meta.output_embedding] if tied else parts
    return names


def int8_group_size(graph: Graph) -> int:
    """Channels that share a scale in the graph's int8 layers; 0 for per-channel weights and per-token activations."""
    for node in graph.calls(reference.linear_w8a8):
        weight, scale = (graph.weights[str(node.args[i].target)].value for i in (2, 3))
        return 0 if scale.shape[1] == 1 else weight.shape[1] // scale.shape[1]
    return 0


def int8_scheme(group_size: int) -> dict[str, Any]:
    """W8A8: per-channel or grouped weights, dynamic activations."""
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    weights: dict[str, Any] = {"strategy": "channel"}
    if group_size:
        weights = {"strategy": "group", "group_size": group_size}
    return {
        "weights": {**common, **weights, "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
        "format": "int-quantized",
    }


def int4_scheme(group_size: int) -> dict[str, Any]:
    """Grouped int4 weights."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    return {"weights": {**weights, "dynamic": False}, "format": "pack-quantized"}
