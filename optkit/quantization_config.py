"""``quantization_config`` of config.json: compressed-tensors' description of a graph's quantized layers.

int8 layers are ``int-quantized``, symmetric int4 ones ``pack-quantized``. The first kind there is stands for all linear
layers but those ignored; others name their modules, which weighs more. The int4 groups say nothing of activations: who
reads the directory multiplies in float, closer to the source than the int8 activations of optkit's runtime, and by
kernels that exist everywhere.
"""

from __future__ import annotations

from typing import Any

from optkit.graph.ir import Graph
from optkit.int4_layout import int4_modules
from optkit.kernels import reference

# The int8 ops, and which argument is the weight; its scales follow it.
INT8_OPS = {reference.linear_w8a8: 2, reference.linear_w8a16: 1}


def quantization_config(graph: Graph) -> dict[str, Any] | None:
    """The description, or None where nothing is stored quantized."""
    groups = config_groups(graph)
    if not groups:
        return None
    left = modules(graph, reference.linear, 1)
    left += [module.name for module in int4_modules(graph) if module.minimum is not None]
    formats = {group["format"] for group in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": sorted(set(left)),
    }


def config_groups(graph: Graph) -> list[dict[str, Any]]:
    """Layers of int8 activations and weights, of int8 weights only, and of int4 weights by group size."""
    groups = []
    for op, position in INT8_OPS.items():
        names = modules(graph, op, position)
        if names:
            scheme = int8_scheme(int8_group_size(graph), activations=op is reference.linear_w8a8)
            groups.append({"targets": sorted(names), **scheme})
    int4 = [module for module in int4_modules(graph) if module.minimum is None]
    for size in sorted({module.group_size for module in int4}):
        names = [module.name for module in int4 if module.group_size == size]
        groups.append({"targets": sorted(names), **int4_scheme(size)})
    if groups:
        groups[0]["targets"] = ["Linear"]
    return groups


def quantized_modules(graph: Graph) -> set[str]:
    """Modules whose weight is quantized in the graph, however it is stored."""
    int8 = (name for op, position in INT8_OPS.items() for name in modules(graph, op, position))
    return {*int8, *(module.name for module in int4_modules(graph))}


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
    for op, position in INT8_OPS.items():
        for node in graph.calls(op):
            weight, scale = (graph.weights[str(node.args[position + i].target)].value for i in (0, 1))
            return 0 if scale.shape[1] == 1 else weight.shape[1] // scale.shape[1]
    return 0


def int8_scheme(group_size: int, activations: bool) -> dict[str, Any]:
    """Per-channel or grouped int8 weights, with or without dynamic int8 activations."""
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    strategy = {"strategy": "group", "group_size": group_size} if group_size else {"strategy": "channel"}
    scheme: dict[str, Any] = {"weights": {**common, **strategy, "dynamic": False}, "format": "int-quantized"}
    if activations:
        scheme["input_activations"] = {**common, "strategy": "token", "dynamic": True}
    return scheme


def int4_scheme(group_size: int) -> dict[str, Any]:
    """Grouped int4 weights."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    return {"weights": {**weights, "dynamic": False}, "format": "pack-quantized"}
