"""Binding: the choice of each node's kernel, the packing of its weights, and the call of the kernel by the node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, fx

from optkit import kernels
from optkit.errors import UserError
from optkit.graph.ir import Graph, Weight
from optkit.graph.ops import op_name
from optkit.graph.variants import SharedWeights

if TYPE_CHECKING:
    from optkit.machine.target import Target


def kernel_of(graph: Graph, node: fx.Node, target: Target | None) -> kernels.Kernel | None:
    """The kernel for a dialect op: the pinned kernel, else the best for the target, else None for the reference.

    Raises:
        UserError: the pinned kernel does not run on the target.
    """
    name = op_name(node.target)
    if name is None:
        raise ValueError(f"{node.name}: {node.target} is not an op of the dialect")
    pinned = node.meta.get("kernel")
    weights = weight_layouts(graph, node)
    try:
        return kernels.select(name, target, pinned=pinned, weights=weights, options=graph.site_options(node))
    except LookupError as error:
        fix = "optkit doctor says what is missing; or optimize the model again on this machine"
        raise UserError(str(error), where=node.name, fix=fix) from error


def bind(graph: Graph, node: fx.Node, kernel: kernels.Kernel, shared: SharedWeights | None = None) -> None:
    """Point ``node`` at the kernel. For a packing kernel, packed weights replace the weight arguments."""
    node.target = kernel.fn
    if kernel.pack is None:
        return
    pack, weights, options = kernel.pack, weight_arguments(graph, node), graph.site_options(node)
    names = [str(node.args[position].target) for position in weights]
    args = list(node.args)
    key = (pack, *names, str(options))
    made = (shared or SharedWeights()).once(key, names, lambda: pack(weight_values(graph, node), options))
    for key, value in made.items():
        name = f"packed.{node.name}.{key}"
        graph.weights[name] = Weight(value, None)
        packed = graph.weight_node(name, node)
        args[key] = packed
    replaced = [node.args[position] for position in weights]
    node.args = tuple(args)
    for weight in replaced:
        drop_unread(graph, weight)


def drop_unread(graph: Graph, node: fx.Node) -> None:
    """Remove a weight's node without readers, and a weight without nodes."""
    if node.users:
        return
    graph.fx.erase_node(node)
    if not any(other.op == "get_attr" and other.target == node.target for other in graph.fx.nodes):
        del graph.weights[str(node.target)]


def weight_arguments(graph: Graph, node: fx.Node) -> dict[int, Weight]:
    """The weights among a node's arguments, by position."""
    found = ((position, graph.weight_of(argument)) for position, argument in enumerate(node.args))
    return {position: weight for position, weight in found if weight is not None}


def weight_values(graph: Graph, node: fx.Node) -> dict[int, Tensor]:
    """The tensors of ``weight_arguments``."""
    return {position: weight.value for position, weight in weight_arguments(graph, node).items()}


def weight_layouts(graph: Graph, node: fx.Node) -> dict[int, Tensor]:
    """Shapes and dtypes of ``weight_arguments``. Values are there for vectors and for tensors in memory."""
    return {
        position: weight.value if len(weight.shape) < 2 else layout(weight)
        for position, weight in weight_arguments(graph, node).items()
    }


def layout(weight: Weight) -> Tensor:
    return weight.stored if isinstance(weight.stored, Tensor) else weight.on_meta()
