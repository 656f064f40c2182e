"""The graph of a rank: a share of each weight, and ops for the exchange of tensors with the other ranks."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.ops.operands import Role
from optkit.graph.ops.record import Op
from optkit.graph.states import KVSpec
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.lowering.compiled.plan import PLAN
from optkit.parallel.plan import RESHAPES, SPLITS, Action, Planner, RankPlan
from optkit.parallel.share import Share
from optkit.parallel.sizes import PIPELINE_PARALLEL, TENSOR_PARALLEL, check_size
from optkit.parallel.weights import Part, Parts

aten = torch.ops.aten
ADD = aten.add.Tensor
BY_COLUMN = (Role.WEIGHT, Role.WEIGHT_SCALE, Role.ZERO)


def rank_graph(graph: Graph, rank: int, size: int, where: str = "tensor_parallel") -> Graph:
    """The graph of ``rank`` of ``size``, a clone. Run together, each rank's graph gives the logits of ``graph``.

    Raises:
        UserError: the model can't be shared by ``size`` ranks.
    """
    check_size(graph.meta, size, where)
    part = clone_for_rank(graph)
    if size > 1:
        Rewriter(part, rank, size).rewrite()
        verify(part, lowered=True)
    return part


def clone_for_rank(graph: Graph) -> Graph:
    """A clone of ``graph`` without compiled regions and numbers of ranks."""
    part, left_out = graph.clone(), (PLAN, TENSOR_PARALLEL, PIPELINE_PARALLEL)
    part.annotations = {key: value for key, value in part.annotations.items() if key not in left_out}
    return part


class Rewriter:
    """Rewrites ``graph``, in place, to the graph of ``rank``."""

    def __init__(self, graph: Graph, rank: int, size: int) -> None:
        self.graph, self.rank, self.size = graph, rank, size
        self.values = (planner := Planner(graph, size)).values
        self.plan: RankPlan = planner.plan()
        self.parts = Parts(graph)
        tables = (node for node, action in self.plan.actions.items() if action is Action.TABLE)
        self.tables = {str(ops.weight(node).target) for node in tables}
        self.tables |= {
            str(scale.target)
            for node in self.plan.actions
            if self.plan.actions[node] is Action.TABLE
            and (scale := ops.op_of(node).with_role(node, Role.WEIGHT_SCALE)) is not None
        }

    def rewrite(self) -> None:
        for node in list(self.graph.fx.nodes):
            self.sizes(node)
            for weight, dim, share in self.plan.weights.get(node, ()):
                part = self.parts.node(weight, Part(dim, share.ranges(self.rank, self.size)), node)
                node.replace_input_with(weight, part)
            match self.plan.actions.get(node):
                case Action.COLUMNS:
                    self.columns(node, self.plan.shares[node])
                case Action.ROWS:
                    self.rows(node)
                case Action.SUMS:
                    self.sums(node)
                case Action.GATHERED:
                    self.gathered(node)
                case Action.TABLE:
                    self.table(node)
                case Action.SCALE:
                    self.scale(node)
        output = self.graph.fx.output_node()
        logits = self.plan.shares.get(output.args[0])
        if isinstance(logits, Share):
            output.args = (self.gather(output.args[0], logits, output),)
        self.graph.meta = self.graph.meta.with_kv_specs(self.kv_spec(s) for s in self.graph.meta.kv_specs)
        self.graph.prune()

    def kv_spec(self, spec: KVSpec) -> KVSpec:
        """The KV of a layer in the rank: some of the KV heads."""
        if not set(spec.inputs) <= self.plan.shared_pools:
            return spec
        return replace(spec, num_kv_heads=spec.num_kv_heads // self.size)

    # -- sizes in arguments --------------------------------------------------------------------------------

    def sizes(self, node: fx.Node) -> None:
        """Put the rank's sizes into the arguments of a reshape or a split of shares."""
        name = ops.op_name(node.target) if node.op == "call_function" else None
        if name in RESHAPES and isinstance(share := self.plan.shares.get(node), Share):
            shape = list(node.args[1])
            if shape[share.dim] != -1:
                shape[share.dim] = share.local(self.rank, self.size)
            node.args = (node.args[0], shape)
        source = self.plan.shares.get(node.args[0]) if name in SPLITS else None
        if isinstance(source, Share) and self.splits_share(node, source):
            local = source.sizes(self.rank, self.size)
            given = local if name == SPLITS[0] else local[0]
            node.args = (node.args[0], given, *node.args[2:])

    def splits_share(self, node: fx.Node, share: Share) -> bool:
        """True for a split of the shared dimension."""
        return len(share.parts) > 1 and len(share.parts) == len(self.values[node])

    # -- linear layers -------------------------------------------------------------------------------------

    def columns(self, node: fx.Node, share: Share) -> None:
        """Keep the rank's columns of the result."""
        op = ops.op_of(node)
        for place, operand in enumerate(op.tensors):
            weight = node.args[place] if place < len(node.args) else None
            if weight is not None and operand.role in (*BY_COLUMN, Role.BIAS):
                self.cut(node, place, Part(0, share.ranges(self.rank, self.size), self.zeros(weight, share)))

    def zeros(self, weight: fx.Node, share: Share) -> int:
        """1 where an embedding reads the same weight: both read the part with a row of zeros."""
        return int(str(weight.target) in self.tables and len(share.parts) == 1 and share.unit == 1)

    def cut(self, node: fx.Node, place: int, part: Part) -> None:
        """Replace argument ``place``, a weight, by ``part`` of the weight."""
        args = list(node.args)
        args[place] = self.parts.node(args[place], part, node)
        node.args = tuple(args)

    def input_part(self, node: fx.Node) -> Share:
        """The share of the input channels of a linear layer."""
        share: Share = self.plan.shares[ops.activation(node)]
        return share

    def cut_rows(self, node: fx.Node) -> None:
        """Keep the rank's input channels of the weights of a linear layer, without the bias."""
        op, share = ops.op_of(node), self.input_part(node)
        ((start, stop),), total = share.ranges(self.rank, self.size), share.parts[0]
        for place, operand in enumerate(op.tensors):
            weight = node.args[place] if place < len(node.args) else None
            if weight is None or operand.role not in BY_COLUMN:
                continue
            columns = self.graph.weights[str(weight.target)].shape[1]
            if operand.role is Role.WEIGHT or columns > 1:
                self.cut(node, place, Part(1, ((start * columns // total, stop * columns // total),)))
        if "bias" in op.positions and op.positions["bias"] < len(node.args):
            args = list(node.args)
            args[op.positions["bias"]] = None
            node.args = tuple(args)

    def rows(self, node: fx.Node) -> None:
        """Multiply the rank's input channels, and add the results of all ranks, then the bias."""
        bias = ops.bias(node)
        self.cut_rows(node)
        total = self.after(node, reference.all_reduce, node)
        if bias is not None:
            total = self.after(total, ADD, total, bias)
        replace_uses(node, total)

    def sums(self, node: fx.Node) -> None:
        """Multiply the rank's input channels in int8; int32 sums of all ranks are added and then become floats."""
        op = ops.op_of(node)
        scale, weight_scale, bias = (
            op.argument(node, "scale"),
            op.argument(node, "weight_scale"),
            op.bias(node),
        )
        self.cut_rows(node)
        with self.graph.fx.inserting_before(node):
            sums = self.call(reference.int8_sums, node.args[0], op.weight(node))
            total = self.call(reference.all_reduce, sums)
            result = self.call(reference.dequantize_sums, total, scale, weight_scale, bias)
        node.replace_all_uses_with(result)
        self.graph.fx.erase_node(node)

    def gathered(self, node: fx.Node) -> None:
        """Gather the input, compute some columns, and gather the columns."""
        op = ops.op_of(node)
        values = [op.argument(node, operand.name) for operand in op.tensors]
        found = [(v, s) for v in values if isinstance(s := self.plan.shares.get(v), Share)]
        if len(found) == 2:  # codes and scales: one exchange
            (codes, share), (scales, groups) = found
            with self.graph.fx.inserting_before(node):
                sizes = (share.parts[0], share.unit, groups.parts[0])
                both = self.call(reference.all_gather_quantized, codes, scales, *sizes)
                parts = [self.call(operator.getitem, both, i) for i in range(2)]
            node.replace_input_with(codes, parts[0])
            node.replace_input_with(scales, parts[1])
        else:
            for value, share in found:
                node.replace_input_with(value, self.gather(value, share, node))
        share = Share(1, (self.values[node].shape[1],))
        if share.fits(self.size):
            self.columns(node, share)
            replace_uses(node, self.after(node, reference.all_gather, node, share.parts[0], share.unit))

    def gather(self, value: fx.Node, share: Share, before: fx.Node) -> fx.Node:
        """All ranks' shares of ``value``."""
        with self.graph.fx.inserting_before(before):
            return self.call(reference.all_gather, value, share.parts[0], share.unit)

    # -- other ops -----------------------------------------------------------------------------------------

    def table(self, node: fx.Node) -> None:
        """Look up the rank's token ids; other ids get a row of zeros, and the ranks' rows are added."""
        op = ops.op_of(node)
        table = op.weight(node)
        share = Share(0, (self.graph.weights[str(table.target)].shape[0],))
        ((first, last),) = share.ranges(self.rank, self.size)
        with self.graph.fx.inserting_before(node):
            local = self.call(reference.local_ids, op.argument(node, "ids"), first, last - first)
        node.replace_input_with(op.argument(node, "ids"), local)
        for weight in (table, op.with_role(node, Role.WEIGHT_SCALE)):
            if weight is not None:
                part = Part(0, ((first, last),), zeros=1)
                node.replace_input_with(weight, self.parts.node(weight, part, node))
        replace_uses(node, self.after(node, reference.all_reduce, node))

    def scale(self, node: fx.Node) -> None:
        """Quantize the rank's channels by the largest magnitude of the whole row."""
        x = ops.activation(node)
        with self.graph.fx.inserting_before(node):
            most = self.call(reference.all_reduce, self.call(reference.absmax_per_token, x), "max")
            quantized = self.call(reference.quantize_by, x, most)
        node.replace_all_uses_with(quantized)
        self.graph.fx.erase_node(node)

    def call(self, target: Any, *args: Any) -> fx.Node:
        return self.graph.fx.call_function(target, args)

    def after(self, node: fx.Node, target: Any, *args: Any) -> fx.Node:
        """A call of ``target`` behind ``node``."""
        with self.graph.fx.inserting_after(node):
            return self.call(target, *args)


def replace_uses(node: fx.Node, result: fx.Node) -> None:
    """Let the readers of ``node`` read ``result``, which is computed from ``node``."""
    chain = {result, *result.all_input_nodes}
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in chain)


def describe(graph: Graph, size: int) -> tuple[dict[str, str], dict[str, str]]:
    """The layers that ranks share, and the whole layers: sentences by the name of the weight or of the node."""
    plan = Planner(graph, size).plan()
    shared = {label(node): action.value for node, action in plan.actions.items()}
    named = {node.name: node for node in graph.fx.nodes}
    return shared, {label(named[name]): reason for name, reason in plan.whole.items()}


def label(node: fx.Node) -> str:
    """The module of a node's weight; the name of a node without a weight."""
    op: Op | None = ops.record_of(node.target)
    weight = op.weight(node) if op is not None else None
    if isinstance(weight, fx.Node) and weight.op == "get_attr":
        return str(weight.target).rpartition(".")[0]
    return node.name
