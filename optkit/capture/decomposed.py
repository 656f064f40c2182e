"""Decompositions of an exported program's ops, node by node.

``ExportedProgram.run_decompositions`` traces the whole program twice, which takes longer than the export. Here the
decomposition of a node alone is traced, on the fake tensors of the node's inputs, and once for all nodes with equal
arguments: layers repeat each other. The nodes are the same as by ``run_decompositions``
(``tests/capture/test_decomposed.py``). A program with an op that writes into an argument, or with a program within,
is left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from optkit.graph.ops import op_name

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def decompose(
    program: torch.export.ExportedProgram, table: Mapping[Any, Callable[..., Any]]
) -> torch.export.ExportedProgram:
    """The program without the ops of ``table``; the same object, rewritten, where torch is not needed.

    Composite ops outside of the table are decomposed too, except the ops of ``optkit.graph.ops``.

    Args:
        table: a decomposition for each op to be replaced.
    """
    if not any(map(is_beyond, program.graph.nodes)):
        Decomposer(program, table).run()
    if any(map(is_beyond, program.graph.nodes)):
        return program.run_decompositions(dict(table))
    return program


def is_beyond(node: fx.Node) -> bool:
    """True for a node with effects beyond the result: a write into an argument, or a run of another graph."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    return node.op == "get_attr" or isinstance(node.target, torch._ops.HigherOrderOperator)


class Decomposer:
    """Rewrites a program; ``traced`` holds the decomposition for each kind of node."""

    def __init__(
        self, program: torch.export.ExportedProgram, table: Mapping[Any, Callable[..., Any]]
    ) -> None:
        self.graph, self.signature = program.graph, program.graph_signature
        self.table = table
        values = (node.meta.get("val") for node in self.graph.nodes)
        self.fake = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
        self.traced: dict[Any, fx.Graph | None] = {}

    def run(self) -> None:
        self.graph.eliminate_dead_code()
        for node in list(self.graph.nodes):
            self.rewrite(node)
        self.graph.eliminate_dead_code()

    def rewrite(self, node: fx.Node) -> None:
        """Replace ``node`` by a decomposition, and the nodes of the decomposition in turn."""
        body = self.decomposition(node)
        if body is not None:
            for new in self.replaced(node, body):
                self.rewrite(new)

    def decomposition(self, node: fx.Node) -> fx.Graph | None:
        """The traced decomposition; None without one, and where the decomposition is the op again, like a size."""
        rule = self.rule(node.target)
        if rule is None:
            return None
        key = node.target, kind(node)
        if key not in self.traced:
            with self.fake:
                body = traced(node, rule)
            itself = any((n.target, kind(n)) == key for n in body.nodes if n.target == node.target)
            self.traced[key] = None if itself else body
        return self.traced[key]

    def rule(self, target: Any) -> Callable[..., Any] | None:
        """The decomposition of an op, None for a kept op; like torch, no composite op with aliases is kept."""
        if target in self.table:
            return self.table[target]
        if not isinstance(target, torch._ops.OpOverload) or not target.has_kernel_for_dispatch_key(COMPOSITE):
            return None
        may_alias = any(argument.alias_info is not None for argument in target._schema.arguments)
        return target.decompose if may_alias or op_name(target) is None else None

    def replaced(self, node: fx.Node, body: fx.Graph) -> list[fx.Node]:
        """The new nodes in place of ``node``, which is erased."""
        inputs = (n for n in body.nodes if n.op == "placeholder")
        copies = dict(zip(inputs, node.all_input_nodes, strict=True))
        with self.graph.inserting_before(node):
            result = self.graph.graph_copy(body, copies)
        if isinstance(result, fx.Node):
            node.replace_all_uses_with(result)
            self.signature.replace_all_uses(node.name, result.name)
        else:
            for user in list(node.users):  # each takes one of several results
                user.replace_all_uses_with(result[user.args[1]])
                self.signature.replace_all_uses(user.name, result[user.args[1]].name)
                self.graph.erase_node(user)
        self.graph.erase_node(node)
        return [copies[n] for n in body.nodes if n.op not in ("placeholder", "output")]


def traced(node: fx.Node, rule: Callable[..., Any]) -> fx.Graph:
    """The graph of ``rule`` on the arguments of ``node``, one op deep, with a placeholder for each input."""

    def function(*values: Any) -> Any:
        given = dict(zip(node.all_input_nodes, values, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
        with torch._C.DisableTorchFunction():  # make_fx's mode calls the op in place of ``decompose``
            return rule(*args, **kwargs)

    return make_fx(function, pre_dispatch=True)(*(n.meta["val"] for n in node.all_input_nodes)).graph


def kind(node: fx.Node) -> str:
    """The arguments of ``node``: constants, and dtype, device and symbolic layout of each input, without names."""
    place = {source: index for index, source in enumerate(node.all_input_nodes)}

    def described(source: fx.Node) -> str:
        value = source.meta["val"]
        if not isinstance(value, Tensor):
            return f"{place[source]}: {value}"
        layout = tuple(value.shape), value.stride(), value.storage_offset()
        return f"{place[source]}: {value.dtype} {value.device} {layout}"

    return repr(fx.map_arg((node.args, node.kwargs), described))
