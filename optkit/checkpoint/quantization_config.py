"""``quantization_config`` of config.json: compressed-tensors' description of a graph's quantized layers.

Modules with equal schemes are a group. The first group stands for all linear layers except ignored layers; other groups
name the modules, and a name has precedence. Groups of packed weights have no rule for activations: readers of the
directory multiply in float, closer to the source than the int8 activations of optkit's runtime, with kernels available
on every machine.
"""

from __future__ import annotations

import json
from typing import Any

from torch import fx

from optkit.checkpoint.compressed import FLOAT8, INTS, NAME, PACK
from optkit.checkpoint.compressed_tensors_writer import quantized_embedding, stored_format
from optkit.checkpoint.modules import modules
from optkit.checkpoint.quantized_linear import INPUT_SCALE, ZERO_POINT, QuantizedLinear
from optkit.graph import ops
from optkit.graph.ir import TWO_FOUR, Graph, module_name
from optkit.kernels import reference

EXPERTS = r"re:.*\.experts\.\d+\..*"
# Formats in the order of their groups.
ORDER = (INTS, FLOAT8, PACK)


def quantization_config(graph: Graph) -> dict[str, Any] | None:
    """The description, or None where nothing is stored quantized."""
    found = list(modules(graph))
    groups = config_groups(found, quantized_embedding(graph), graph.meta.output_embedding)
    sparsity = sparsity_config(graph)
    if not groups:
        return sparsity and {"quant_method": NAME, "format": "dense", **sparsity}
    left = float_modules(graph) + [module.name for module in found if stored_format(module) is None]
    formats = {group["format"] for group in groups}
    described = {
        "quant_method": NAME,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": sorted(set(left)),
    }
    experts = expert_modules(graph)
    name_experts(groups, experts)
    in_float = any(map(packs_zero_points, groups)) or bool(experts)
    return described | ({"dequantize": True} if in_float else {}) | (sparsity or {})


def sparsity_config(graph: Graph) -> dict[str, Any] | None:
    """``sparsity_config`` of a graph with 2:4 sparse float layers, which are stored with their zeros; else None."""
    names = set(graph.annotations.get(TWO_FOUR, ()))
    sparse = [node for node in graph.linears() if node.name in names]
    if not sparse:
        return None
    pruned = {str(ops.weight(node).target) for node in sparse}
    sizes = {name: weight.shape.numel() for name, weight in graph.weights.items() if weight.origin}
    described = {
        "format": "dense",
        "sparsity_structure": "2:4",
        "global_sparsity": round(sum(sizes[name] for name in pruned) / 2 / sum(sizes.values()), 6),
        "targets": ["Linear"],
        "ignore": sorted(set(float_modules(graph)) - {m for node in sparse for m in modules_of(graph, node)}),
    }
    return {"sparsity_config": described}


def modules_of(graph: Graph, linear: fx.Node) -> list[str]:
    """The modules of the checkpoint in a linear layer, several of a fused one."""
    weight = graph.weight_of(ops.weight(linear))
    return [module_name(part.name) for part in weight.origin.parts] if weight and weight.origin else []


def expert_modules(graph: Graph) -> set[str]:
    """The modules of quantized experts, which transformers fuses on loading: it can only do so with float weights."""
    nodes = [node for node in graph.calls(*ops.QUANTIZED_LINEARS) if ops.op_of(node).linear]
    weights = [graph.weight_of(ops.weight(node)) for node in nodes]
    return {module_name(part.name) for w in weights if w is not None and w.origin for part in w.origin.parts}


def name_experts(groups: list[dict[str, Any]], experts: set[str]) -> None:
    """Name the experts by a pattern, where all are of one group and the group does not stand for all linear layers.

    transformers (5.23) finds the scheme of experts by a pattern with the word.
    """
    for group in groups[1:]:
        if experts and experts <= set(group["targets"]):
            group["targets"] = [*sorted(set(group["targets"]) - experts), EXPERTS]


def packs_zero_points(group: dict[str, Any]) -> bool:
    """True where transformers must dequantize a group at load.

    By default transformers prepares modules by compressed-tensors (0.20). On the meta device
    ``PackedQuantizationCompressor.compress`` takes packed zero points for unpacked and finds other shapes.
    ``dequantize`` avoids the preparation.
    """
    return group["format"] == PACK and not group["weights"]["symmetric"]


def config_groups(found: list[QuantizedLinear], embedding: str | None, head: str) -> list[dict[str, Any]]:
    """Modules by scheme, int8 first.

    The int8 ``embedding``, if any, is always named, since ``Linear`` stands for linear layers only; the weight is
    that of ``head``, too.
    """
    by_scheme: dict[str, list[str]] = {}
    for module in found:
        if stored_format(module) is not None:
            names = [embedding, head] if module.name == embedding else [module.name]
            by_scheme.setdefault(json.dumps(scheme(module)), []).extend(names)
    groups = [{"targets": sorted(names), **json.loads(key)} for key, names in by_scheme.items()]
    groups.sort(key=lambda group: (ORDER.index(group["format"]), "input_activations" not in group))
    if groups:
        groups[0]["targets"] = ["Linear", *(name for name in groups[0]["targets"] if name == embedding)]
    return groups


def scheme(module: QuantizedLinear) -> dict[str, Any]:
    """Weights, activations and format of a module, as in ``config_groups``."""
    stored = stored_format(module)
    floating = stored == FLOAT8
    common = {"num_bits": module.bits, "type": "float" if floating else "int"}
    size = module.group_size
    strategy = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    weights = {**common, "symmetric": ZERO_POINT not in module.operands, **strategy, "dynamic": False}
    described: dict[str, Any] = {"weights": weights, "format": stored}
    if module.op is reference.linear_w8a8 or module.options.get("activations", "none") != "none":
        dynamic = INPUT_SCALE not in module.operands
        kind = "token" if dynamic else "tensor"
        described["input_activations"] = {**common, "symmetric": True, "strategy": kind, "dynamic": dynamic}
    return described


def float_modules(graph: Graph) -> list[str]:
    """Modules with a float linear layer; fused layers are spelled out."""
    names = []
    for node in graph.calls(reference.linear, reference.expert_linear, reference.head_linear):
        weight = graph.weight_of(ops.weight(node))
        if weight is None or weight.origin is None:
            continue
        tied = str(ops.weight(node).target) == graph.meta.input_embedding
        names += [graph.meta.output_embedding] if tied else [module_name(p.name) for p in weight.origin.parts]
    return names


def quantized_modules(graph: Graph) -> set[str]:
    """Modules with a quantized weight in the graph, in any stored layout."""
    return {module.name for module in modules(graph)}
