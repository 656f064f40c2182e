"""The quantized modules of a graph: what every format is written from.

A node of a quantized op may be several modules of the checkpoint, fused. Each gets its rows of the operands; what
belongs to input channels (``weight_g_idx``, ``input_scale``) all of them share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from optkit.checkpoint.quantized import G_IDX, PACKED, SCALE, float_weight
from optkit.graph import ops
from optkit.graph.ir import Graph, module_name
from optkit.graph.ops.operands import Role
from optkit.kernels.packed_codes import WORD

MINIMUM, INPUT_SCALE = "weight_minimum", "input_scale"
# For each quantized op: the position of its first weight argument, and the names of its weight tensors in a module.
OPERANDS: dict[Callable[..., Tensor], tuple[int, tuple[str, ...]]] = {
    reference: (op.first_weight, tuple(operand.stored for operand in op.stored))
    for reference, op in ops.QUANTIZED_LINEARS.items()
}
SHARED = {o.stored for op in ops.QUANTIZED_LINEARS.values() for o in op.stored if o.role is Role.CHANNELS}


@dataclass(frozen=True)
class Module:
    """One quantized module. ``operands`` are the op's weight arguments by name; those it lacks are not in it."""

    name: str
    op: Callable[..., Tensor]
    operands: Mapping[str, Tensor]
    options: Mapping[str, Any]
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of the float weight."""
        return self.operands[SCALE].shape[0], self.columns

    @property
    def bits(self) -> int:
        return int(self.options.get("bits", 8 if "weight" in self.operands else 4))

    @property
    def group_size(self) -> int:
        """Channels that share a scale; 0 is all of them."""
        groups = self.operands[SCALE].shape[1]
        return int(self.options.get("group_size", 0)) or (0 if groups == 1 else self.columns // groups)

    def tensors(self) -> dict[str, Tensor]:
        """The operands by their full names."""
        return {f"{self.name}.{key}": value for key, value in self.operands.items()}

    def float_weight(self) -> Tensor:
        """The float32 weight [N, K] that the module stands for."""
        _, names = OPERANDS[self.op]
        return float_weight(self.op, [self.operands.get(key) for key in names], self.options, self.columns)


def modules(graph: Graph) -> Iterator[Module]:
    """The quantized modules of ``graph``, fused ones apart."""
    for node in graph.calls(*OPERANDS):
        first, names = OPERANDS[node.target]
        weight = graph.weight_of(node.args[first])
        if weight is None or weight.origin is None:
            continue
        found: dict[str, dict[str, Tensor]] = {module_name(part.name): {} for part in weight.origin.parts}
        for key, argument in zip(names, node.args[first:], strict=False):
            for name, value in pieces(graph, argument, key, found).items():
                found[name][key] = value
        for name, operands in found.items():
            yield Module(name, node.target, operands, node.kwargs, channels(operands, node))


def pieces(graph: Graph, argument: Any, key: str, found: Mapping[str, Any]) -> dict[str, Tensor]:
    """An operand cut into what belongs to each module; nothing if there is no such operand."""
    weight = graph.weight_of(argument)
    if weight is None or weight.origin is None:
        return {}
    if key in SHARED:
        return dict.fromkeys(found, weight.value)
    return {module_name(name): piece for name, piece in weight.origin.split(weight.value).items()}


def shared_by_fused(graph: Graph) -> dict[str, Tensor]:
    """Operands of fused layers that all their modules share, by the names the graph reads; no module has these."""
    names = {module.name for module in modules(graph)}
    found = {}
    for node in graph.calls(*OPERANDS):
        for argument in node.args:
            weight = graph.weight_of(argument)
            parts = weight.origin.parts if weight is not None and weight.origin is not None else ()
            for part in parts:
                owner, _, key = part.name.rpartition(".")
                if weight is not None and key in SHARED and owner not in names:
                    found[part.name] = weight.value
    return found


def channels(operands: Mapping[str, Tensor], node: fx.Node) -> int:
    """Input channels of a module. Packed codes may end in padding; what the op says of its groups tells."""
    if "weight" in operands:
        return operands["weight"].shape[1]
    if G_IDX in operands:
        return len(operands[G_IDX])
    bits, group_size = int(node.kwargs.get("bits", 4)), int(node.kwargs.get("group_size", 0))
    most = operands[PACKED].shape[1] * WORD // bits
    return min(most, operands[SCALE].shape[1] * group_size) if group_size else most
