"""The quantized modules of a graph, the input of every checkpoint writer.

A node of a quantized op may be several modules of the checkpoint, fused. Each module gets the module's rows of the
operands; operands of input channels (``weight_g_idx``, ``input_scale``) are the same for all modules of a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx

from optkit.checkpoint.quantized_linear import G_IDX, PACKED, SCALE, SHARED, QuantizedLinear, operand_names
from optkit.checkpoint.tensors import values_of
from optkit.graph import ops
from optkit.graph.ir import Graph, module_name
from optkit.graph.stored import StoredTensor
from optkit.kernels.packed_codes import WORD


def modules(graph: Graph) -> Iterator[QuantizedLinear]:
    """The quantized modules of ``graph``; a fused layer gives several."""
    for node in graph.calls(*ops.QUANTIZED_LINEARS):
        weight = graph.weight_of(ops.weight(node))
        if weight is None or weight.origin is None:
            continue
        found: dict[str, dict[str, Tensor | StoredTensor]] = {
            module_name(part.name): {} for part in weight.origin.parts
        }
        first = ops.op_of(node).first_weight
        for key, argument in zip(operand_names(node.target), node.args[first:], strict=False):
            for name, value in pieces(graph, argument, key, found).items():
                found[name][key] = value
        for name, raw in found.items():
            operands = StoredOperands(raw)
            shape = operands[SCALE].shape[0], channels(operands, node)
            options = {key: value for key, value in node.kwargs.items() if key != "num_experts"}
            stacked = weight.origin if weight.origin.stacked else None
            yield QuantizedLinear(name, shape, ops.linear_of(node.target), operands, options, stacked=stacked)


class StoredOperands(Mapping[str, Tensor]):
    """Operands of a module, read at each access where they are on disk; ``raw`` has them unread."""

    def __init__(self, raw: Mapping[str, Tensor | StoredTensor]) -> None:
        self.raw = raw

    def __getitem__(self, name: str) -> Tensor:
        return values_of(self.raw[name])

    def __contains__(self, name: object) -> bool:
        return name in self.raw

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)


def raw_tensors(module: QuantizedLinear) -> dict[str, Tensor | StoredTensor]:
    """The operands of a module of ``modules`` by full name, unread where they are on disk."""
    raw = module.operands.raw if isinstance(module.operands, StoredOperands) else module.operands
    return {f"{module.name}.{key}": value for key, value in raw.items()}


def pieces(
    graph: Graph, argument: Any, key: str, found: Mapping[str, Any]
) -> dict[str, Tensor | StoredTensor]:
    """The pieces of an operand by module; empty for an absent operand."""
    weight = graph.weight_of(argument)
    if weight is None or weight.origin is None:
        return {}
    if key in SHARED:
        return dict.fromkeys(found, weight.stored)
    if weight.origin.stacked:
        return {module_name(part.name): weight.stored for part in weight.origin.parts}
    return {module_name(name): piece for name, piece in weight.pieces().items()}


def shared_by_fused(graph: Graph) -> dict[str, Tensor]:
    """Operands of fused layers shared by all modules of the layer, by name in the graph."""
    names = {module.name for module in modules(graph)}
    found = {}
    for node in graph.calls(*ops.QUANTIZED_LINEARS):
        for argument in node.args:
            weight = graph.weight_of(argument)
            parts = weight.origin.parts if weight is not None and weight.origin is not None else ()
            for part in parts:
                owner, _, key = part.name.rpartition(".")
                if weight is not None and key in SHARED and owner not in names:
                    found[part.name] = weight.value
    return found


def channels(operands: Mapping[str, Tensor], node: fx.Node) -> int:
    """Input channels of a module. Packed codes may end in padding, so the op's groups decide."""
    if "weight" in operands:
        return operands["weight"].shape[1]
    if G_IDX in operands:
        return len(operands[G_IDX])
    bits, group_size = int(node.kwargs.get("bits", 4)), int(node.kwargs.get("group_size", 0))
    most = operands[PACKED].shape[1] * WORD // bits
    return min(most, operands[SCALE].shape[1] * group_size) if group_size else most
