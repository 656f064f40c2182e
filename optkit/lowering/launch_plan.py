"""Programs: the parts of a graph that run as a single C call (optkit.kernels.cpu.program).

Nodes with a native kernel are gathered into *stages*: a stage holds all nodes that can run before the next op of
torch. Stages alternate between torch (even) and native (odd), and each native stage becomes a call. A model with a
native kernel for every op has a single native stage: a step is a C call, after a torch op for the rotary angles. Splits
and reshapes of rows cost nothing, as views in the program.

Quantization is fused here and not by a pass, since the fusion changes no bits: an op with an emitter that fuses
quantization also writes the quantized row, and writes the float result only for other readers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.ops.operands import Source
from optkit.graph.shapes import Point, infer_shapes
from optkit.kernels.cpu import chains, emitters
from optkit.kernels.cpu.call_list import LOGITS, TOKENS, Arena
from optkit.kernels.cpu.emit import Arguments, Quantization
from optkit.kernels.cpu.gather import has_exact_reciprocal
from optkit.kernels.cpu.program import NODES, Builder, View

# Batches whose shapes tell what has a row a token or a row a sequence. A single one would take any 3 in a model for the
# number of sequences.
PROBES = (Point(tokens=11, sequences=3, context=37), Point(tokens=13, sequences=2, context=41))
PROBE_BLOCK = 5
DIVIDE = "aten.div.Tensor"
PAIRS = {"aten.add.Tensor", "aten.mul.Tensor", DIVIDE}
SPLITS = {"aten.split_with_sizes.default", "aten.split.Tensor"}
RESHAPES = {"aten.reshape.default", "aten.view.default"}
BATCH = ("input_ids", "logits_index", "seq_lens", "block_tables")  # the inputs with the sizes of a batch
TYPES = (torch.float32, torch.int64, torch.int32, torch.uint8, torch.int8)
WORTH_IT = 4  # ops: a program of fewer gains nothing over calling their kernels


class Programs:
    """The native stages of ``graph``. Made before kernels are bound, installed after."""

    def __init__(self, graph: Graph, native: set[fx.Node]) -> None:
        """``native`` are the nodes whose kernel is native."""
        self.graph = graph
        self.values, others = (infer_shapes(graph, point, PROBE_BLOCK, half=False) for point in PROBES)
        self.rows = {node: kind_of_rows(value, others[node]) for node, value in self.values.items()}
        self.ops = {node: name for node in native if (name := ops.op_name(node.target)) in emitters()}
        self.sizes = {node: node.args[1] for node in graph.fx.nodes if ops.op_name(node.target) in SPLITS}
        self.stage: dict[fx.Node, int] = {}
        self.stages: dict[int, list[fx.Node]] = {}
        for node in graph.fx.nodes:
            if node.op == "call_function":
                self._assign(node)

    def _assign(self, node: fx.Node) -> None:
        latest = max((self.stage.get(n, 0) for n in node.all_input_nodes), default=0)
        if self._is_native(node) or self._is_view(node, latest):
            self.stage[node] = latest + 1 - latest % 2
            self.stages.setdefault(self.stage[node], []).append(node)
        else:
            self.ops.pop(node, None)
            self.stage[node] = latest + latest % 2

    def _is_native(self, node: fx.Node) -> bool:
        if ops.op_name(node.target) in PAIRS and not self._pairs_rows(node):
            return False
        op = ops.record_of(node.target)
        packed = [op.argument(node, operand.name) for operand in op.stored] if op else []
        read = [a for a in node.all_input_nodes if a not in packed]
        typed = all(map(self._is_typed, read))
        return node in self.ops and self._has_rows(node) and typed and self._takes_rows(node)

    def _takes_rows(self, node: fx.Node) -> bool:
        """True where activations have a row a token, or a row a row of logits, and every other tensor but the batch
        is a weight.
        """
        op = ops.record_of(node.target)
        tensors = [
            (operand.source, a)
            for operand, a in zip(op.tensors if op else (), node.args, strict=False)
            if isinstance(a, fx.Node)
        ]
        rows = [a for source, a in tensors if source is Source.VALUE]
        weights = [a for source, a in tensors if source in (Source.WEIGHT, Source.ANY)]
        return all(map(self._has_rows, rows)) and all(a.op == "get_attr" for a in weights)

    def _pairs_rows(self, node: fx.Node) -> bool:
        """True for two float32 tensors of one shape, or one [rows, width] and a weight [width] or a number."""
        given = [a for a in node.args if isinstance(a, fx.Node) and a.op in ("call_function", "get_attr")]
        values = [self.values[a] for a in given]
        numbers = [a for a in node.args if isinstance(a, int | float)]
        count = len(values) + len(numbers)
        if count != 2 or node.kwargs or any(value.dtype is not torch.float32 for value in values):
            return False
        divides = ops.op_name(node.target) == DIVIDE
        if numbers or divides:
            exact = not divides or bool(numbers and has_exact_reciprocal(numbers[0]))
            return given[0].op == "call_function" and exact
        rows = [value.shape for a, value in zip(given, values, strict=True) if a.op == "call_function"]
        vectors = [value.shape for a, value in zip(given, values, strict=True) if a.op == "get_attr"]
        if not vectors:
            return rows[:1] == rows[1:]
        return len(rows) == 1 and (rows[0][1:] == vectors[0] or vectors[0].numel() == 1)

    def _is_view(self, node: fx.Node, latest: int) -> bool:
        """A split, a reshape or a part of a result, of something native in the same stage."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or latest % 2 == 0 or self.stage.get(source) != latest:
            return False
        if node.target is operator.getitem:
            return isinstance(self.values[source], (tuple, list))
        value, name = self.values[source], ops.op_name(node.target)
        if name in SPLITS:
            return value.dim() == 2 and (*node.args[2:], 0)[0] in (1, -1)
        return name in RESHAPES and self._has_rows(node) and self.rows[node] == self.rows[source]

    def _has_rows(self, node: fx.Node) -> bool:
        """True where the first result has a row a token, or a row a row of logits."""
        return self.rows[node] is not None

    def _is_typed(self, node: fx.Node) -> bool:
        value = self.values[node]
        return not isinstance(value, Tensor) or value.dtype in TYPES

    def install(self) -> int:
        """Replace each native stage of the graph, in place, by a call; the number of kernel calls in all stages.

        Kernels must be bound: their weights packed.
        """
        arena, calls = Arena(), 0
        for _, nodes in sorted(self.stages.items()):
            if sum(node in self.ops for node in nodes) >= WORTH_IT:
                try:
                    program, inputs, outputs = Segment(self, nodes).build()
                except NotImplementedError:  # a shape that only the ops by themselves handle
                    continue
                program.calls.arena = arena
                calls += program.num_calls
                self._replace(program, inputs, outputs)
        if calls:
            reorder(self.graph.fx)
            self.graph.prune()
        return calls

    def _replace(self, program: Any, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> None:
        """Replace the ``outputs`` of a stage by results of ``program``."""
        graph = self.graph.fx
        pools = [self.graph.input(spec.inputs[0]) for spec in self.graph.meta.kv_specs[:1]]
        batch = [self.graph.input(name) for name in BATCH]
        with graph.inserting_before(graph.output_node()):
            call = graph.call_function(program, (*batch, *(pools or [None]), *inputs))
            parts = [graph.call_function(operator.getitem, (call, i)) for i in range(len(outputs))]
        for node, part in zip(outputs, parts, strict=True):
            self.values[part], self.rows[part] = self.values[node], self.rows[node]
            node.replace_all_uses_with(part)


class Segment:
    """The nodes of a native stage on their way to a program."""

    def __init__(self, owner: Programs, nodes: Sequence[fx.Node]) -> None:
        self.owner, self.nodes, self.inside = owner, nodes, set(nodes)
        self.builder = Builder()
        self.views: dict[fx.Node, Any] = {}
        self.inputs: list[fx.Node] = []

    def build(self) -> tuple[Any, list[fx.Node], list[fx.Node]]:
        """The program, the input nodes and the output nodes."""
        outputs = self._outputs()
        for node in self.nodes:
            if node not in self.views:
                self._emit(node)
        for node in outputs:
            self.builder.output(self.views[node])
        return self.builder.build(), self.inputs, outputs

    def _outputs(self) -> list[fx.Node]:
        """The nodes read outside. Only whole buffers can be outputs; a view read outside is made again there."""
        for node in reversed(self.nodes):
            if (
                self._read_outside(node)
                and node not in self.owner.ops
                and not is_result(node, self.owner.ops)
            ):
                self._copy_outside(node)
        return [node for node in self.nodes if self._read_outside(node)]

    def _read_outside(self, node: fx.Node) -> bool:
        return any(user not in self.inside for user in node.users)

    def _copy_outside(self, node: fx.Node) -> None:
        graph = self.owner.graph.fx
        with graph.inserting_after(node):
            copy = graph.node_copy(node)
        self.owner.values[copy], self.owner.rows[copy] = self.owner.values[node], self.owner.rows[node]
        node.replace_all_uses_with(copy, delete_user_cb=lambda user: user not in self.inside)

    def _emit(self, node: fx.Node) -> None:
        if node in self.owner.ops:
            if not self._call_chain(node):
                self._call(node)
        elif node.target is operator.getitem:
            self.views[node] = self.views[node.args[0]][node.args[1]]
        elif node in self.owner.sizes:
            sizes = [part.shape[-1] for part in self.owner.values[node]]
            self.views[node] = self._view(node.args[0]).split(sizes)
        else:
            self.views[node] = self._view(node.args[0]).reshape(self.owner.values[node].shape[1:])

    def _call_chain(self, node: fx.Node) -> bool:
        """Emit a chain of ops that starts at ``node`` as one call; False where there is none."""
        for chain in chains():
            nodes = self._chain(node, chain.ops)
            if nodes:
                self.builder.node = NODES.join(each.name for each in nodes)
                try:
                    view = chain.emit(self.builder, *(self._arguments(each, inside=nodes) for each in nodes))
                except NotImplementedError:
                    continue
                self.views.update(dict.fromkeys(nodes, ()))
                self.views[nodes[-1]] = view
                return True
        return False

    def _chain(self, node: fx.Node, names: Sequence[str]) -> list[fx.Node]:
        """The ops ``names`` from ``node`` on, each the only reader of the previous op; empty where there are none."""
        nodes = [node]
        while self.owner.ops.get(nodes[-1]) == names[len(nodes) - 1]:
            if len(nodes) == len(names):
                return nodes
            readers = list(nodes[-1].users)
            if len(readers) != 1 or readers[0] not in self.inside or readers[0].args[0] is not nodes[-1]:
                break
            nodes.append(readers[0])
        return []

    def _arguments(self, node: fx.Node, inside: Sequence[fx.Node]) -> Arguments:
        """The arguments of ``node``; None for results of nodes ``inside``."""

        def of(value: Any) -> Any:
            return None if value in inside else self._argument(value)

        return Arguments([of(a) for a in node.args], {name: of(a) for name, a in node.kwargs.items()})

    def _call(self, node: fx.Node) -> None:
        emitter = emitters()[self.owner.ops[node]].emit
        self.builder.node = node.name
        args = [self._argument(a) for a in node.args]
        kwargs = {name: self._argument(a) for name, a in node.kwargs.items()}
        reader = self._quantization_of(node)
        result: Sequence[Any]
        if reader is None:
            result = emitter(self.builder, *args, **kwargs)
        else:
            group_size = ops.RECORDS["quantize_per_token"].argument(reader, "group_size")
            wanted = Quantization(group_size, keep=len(list(self._readers(node))) > 1)
            *result, q, scale = emitter(self.builder, *args, **kwargs, quantized=wanted)
            self.views[reader] = (q, scale)
        is_tuple = not isinstance(self.owner.values[node], Tensor)
        self.views[node] = tuple(result) if is_tuple else result[0]

    def _quantization_of(self, node: fx.Node) -> fx.Node | None:
        """The quantization of the first result of ``node`` within the same call, or None."""
        if not emitters()[self.owner.ops[node]].fuses_quantization:
            return None
        found = [r for r in self._readers(node) if self.owner.ops.get(r) == "quantize_per_token"]
        return found[0] if len(found) == 1 and found[0] in self.inside else None

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """The readers of the first result of ``node``."""
        if isinstance(self.owner.values[node], Tensor):
            yield from node.users
        else:
            for part in node.users:
                if part.args[1] == 0:
                    yield from part.users

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if value.op == "get_attr":
            return self.owner.graph.weights[str(value.target)].value
        return self._view(value)

    def _view(self, node: Any) -> View:
        if node not in self.views:
            value = self.owner.values[node]
            kind = self.owner.rows[node]
            rows = TOKENS if kind is None else kind
            check = node.op != "placeholder"  # the runner makes those
            self.views[node] = self.builder.input(rows, value.shape[1:], value.dtype, check=check)
            self.inputs.append(node)
        return self.views[node]


def kind_of_rows(*values: Any) -> int | None:
    """The kind of row of a value at the ``PROBES``, by its first result; None for a value without such rows.

    Args:
        values: meta tensors, or tuples of results.
    """
    found = [value[0] if isinstance(value, (tuple, list)) else value for value in values]
    if not all(isinstance(value, Tensor) and value.dim() > 0 for value in found):
        return None
    if any(value.shape[1:] != found[0].shape[1:] for value in found):
        return None
    numbers = [int(value.shape[0]) for value in found]
    kinds = {
        TOKENS: [point.tokens for point in PROBES],
        LOGITS: [point.sequences for point in PROBES],
    }
    return next((kind for kind, sizes in kinds.items() if sizes == numbers), None)


def is_result(node: fx.Node, ops: Mapping[fx.Node, str]) -> bool:
    """True for a part of a native op's results: the part has memory of its own, unlike other views."""
    return node.target is operator.getitem and node.args[0] in ops


def reorder(graph: fx.Graph) -> None:
    """Move each node behind all inputs; otherwise the order stays."""
    done: set[fx.Node] = set()
    nodes = list(graph.nodes)
    last = nodes[0]
    pending = nodes
    while pending:
        later = []
        for node in pending:
            if all(n in done for n in node.all_input_nodes):
                if node is not last:
                    last.append(node)
                last = node
                done.add(node)
            else:
                later.append(node)
        pending = later
