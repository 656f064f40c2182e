"""Lowering: each op of a graph becomes the kernel that runs it, and the graph becomes a Python function.

``lower`` picks a kernel per node (``kernels.select``, or the kernel a pass pinned), lets kernels pack
their weights once, and compiles the FX graph to straight-line Python: no interpreter at run time, values freed
after their last use. Stretches of native kernels become programs (``optkit.graph.programs``), regions named in
``graph.plan["compile"]`` are compiled by ``optkit.graph.regions``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn

from optkit import kernels
from optkit.errors import UserError
from optkit.graph.ir import Graph, KVSpec
from optkit.graph.ops import op_name
from optkit.graph.regions import RegionLowering

if TYPE_CHECKING:
    from optkit.graph.programs import Programs
    from optkit.target import Target


class Executable:
    """A lowered graph: call it with the batch inputs of docs/architecture.md, get logits [L, V] float32."""

    def __init__(self, module: fx.GraphModule, graph: Graph, chosen: dict[str, str]) -> None:
        self.module = module
        self.inputs = tuple(str(n.target) for n in module.graph.nodes if n.op == "placeholder")
        self.kv_specs: list[KVSpec] = list(graph.meta.kv_specs)
        self.vocab_size = graph.meta.vocab_size
        self.max_model_len = graph.meta.max_model_len
        self.kernels = chosen

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.module(*[inputs[name] for name in self.inputs])


def lower(
    graph: Graph, target: Target | None = None, *, programs: bool = True, consume: bool = False
) -> Executable:
    """Make ``graph`` executable on ``target``; without a target every op runs its reference.

    ``programs=False`` leaves every kernel call to Python, for comparison; results are the same to the bit.
    ``consume=True`` uses ``graph`` up: each weight goes as soon as it is packed, so that no two copies are held.
    """
    working = graph if consume else graph.clone()
    root = nn.Module()
    regions = RegionLowering(working)
    calls = [node for node in working.fx.nodes if node.op == "call_function"]
    picked = {node: kernel for node in calls if (kernel := kernel_of(working, node, target))}
    chosen = {node.name: kernel.name for node, kernel in picked.items()}
    native = native_programs(working, picked) if programs and target and target.kind == "cpu" else None
    for node, kernel in picked.items():
        bind(working, node, kernel)
    if native is not None:
        chosen |= {node.name: "native" for node in native.ops}
        native.install()
    working.prune()
    names: dict[str, str] = {}
    for node in working.fx.nodes:
        if node.op == "get_attr":
            name = str(node.target)
            if name not in names:
                names[name] = f"w{len(names)}"
                root.register_buffer(names[name], working.weights[name].value)
            node.target = names[name]
    regions.install(root)
    module = fx.GraphModule(root, working.fx)
    return Executable(module, graph, chosen)


def native_programs(graph: Graph, picked: Mapping[fx.Node, kernels.Kernel]) -> Programs | None:
    """The parts of ``graph`` that run as programs, or None: compiled regions were chosen because they are faster."""
    from optkit.graph.programs import Programs
    from optkit.kernels.cpu import native

    if "compile" in graph.plan or not native.available():
        return None
    in_table = {kernel.op for kernel in kernels.table()}  # not picked, they run by their reference
    able = {node for node in graph.fx.nodes if op_name(node.target) not in in_table}
    return Programs(graph, able | {node for node, kernel in picked.items() if kernel.name == "native"})


def kernel_of(graph: Graph, node: fx.Node, target: Target | None) -> kernels.Kernel | None:
    """The kernel for a dialect op: the pinned one, else the best for the target, else None (as it is)."""
    name = op_name(node.target)
    if name is None:
        raise ValueError(f"{node.name}: {node.target} is not an op of the dialect")
    pinned = node.meta.get("kernel")
    weights = weight_arguments(graph, node)
    try:
        return kernels.select(name, target, pinned=pinned, weights=weights, options=graph.site_options(node))
    except LookupError as error:
        fix = "optkit doctor says what is missing; or optimize the model again on this machine"
        raise UserError(str(error), where=node.name, fix=fix) from error


def bind(graph: Graph, node: fx.Node, kernel: kernels.Kernel) -> None:
    """Point ``node`` at the kernel; a packing kernel gets its weight arguments packed into new weights."""
    node.target = kernel.fn
    if kernel.pack is None:
        return
    weights = weight_arguments(graph, node)
    args = list(node.args)
    for position, value in kernel.pack(weights, graph.site_options(node)).items():
        name = f"packed.{node.name}.{position}"
        graph.weights[name] = type(graph.weights[str(node.args[position].target)])(value, None)
        args[position] = graph.weight_node(name, node)
    replaced = [node.args[position] for position in weights]
    node.args = tuple(args)
    for weight in replaced:
        drop_unread(graph, weight)


def drop_unread(graph: Graph, node: fx.Node) -> None:
    """Remove a weight's node, and the weight, where nothing reads them any more."""
    if node.users:
        return
    graph.fx.erase_node(node)
    if not any(other.op == "get_attr" and other.target == node.target for other in graph.fx.nodes):
        del graph.weights[str(node.target)]


def weight_arguments(graph: Graph, node: fx.Node) -> dict[int, Tensor]:
    """The weight tensors among a node's arguments, by position."""
    return {i: graph.weights[str(a.target)].value for i, a in enumerate(node.args) if graph.weight_of(a)}
