"""From the exported program's ``[1, T, ...]`` to the flattened token batch's ``[T, ...]``.

The export runs a single sequence, so every activation has a leading dimension of 1. Each node is copied without the
leading dimension (the value is then called *flat*): dimension arguments shift by one, views lose the first size,
elementwise ops need no change. A node without an applicable rule gets unsqueezed inputs and a squeezed output, so an op
without a rule is slower, never wrong. Views take sizes from the exported shapes with -1 for the token count: the
resulting graph holds no shape arithmetic.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from optkit.capture import state_wiring
from optkit.capture.boundary import OUTSIDE_INTERFACE
from optkit.capture.experts import checkpoint_origins
from optkit.errors import UnsupportedModel
from optkit.graph.ir import BATCH_INPUTS, Graph, GraphMeta, Origin, Part, Weight
from optkit.graph.ops import op_name
from optkit.graph.ops.aten import PLACEMENT, POINTWISE, SCALAR_OPS
from optkit.graph.ops.aten import aten as op_of_name
from optkit.graph.ops.attention import ATTENTION, visible
from optkit.graph.states import STATE_SLOTS, KVSpec, StateSpec, kv_of
from optkit.kernels import PLAIN, reference

aten = torch.ops.aten

ELEMENTWISE = {op_of_name(name) for name in POINTWISE}

# Position of the dimension argument, and its default where the op has one.
DIM_ARGUMENT: dict[Any, tuple[int, Any]] = {
    aten.unsqueeze.default: (1, None),
    aten.squeeze.dim: (1, None),
    aten.slice.Tensor: (1, 0),
    aten.select.int: (1, None),
    aten.cat.default: (1, 0),
    aten.stack.default: (1, 0),
    aten.split.Tensor: (2, 0),
    aten.split_with_sizes.default: (2, 0),
    aten.softmax.int: (1, None),
    aten.mean.dim: (1, None),
    aten.sum.dim_IntList: (1, None),
    aten.topk.default: (2, -1),
    aten.sort.default: (1, -1),
    aten.cumsum.default: (1, None),
    aten.repeat_interleave.self_int: (2, None),
    aten.amax.default: (1, None),
}
ADDS_DIMENSION = {aten.unsqueeze.default, aten.stack.default}
SIZE_OPS = {aten.view.default, aten.reshape.default, aten.expand.default}
ROW_OPS = {aten.linear.default, aten.layer_norm.default}  # act on the last dimension of their first argument
CONTEXT = ("max_position_embeddings", "max_seq_len")  # names in configurations
DROPPED = {aten._assert_tensor_metadata.default, aten._assert_scalar.default, aten._assert_async.msg}


@dataclass(frozen=True)
class Captured:
    """An exported program and the source model, for names of weights and the configuration."""

    program: torch.export.ExportedProgram
    model: Any
    config: Any


def flatten(captured: Captured) -> Graph:
    """Copy the exported graph into a ``Graph`` over the flattened token batch."""
    return Flattener(captured).run()


def read_by_output(graph: fx.Graph) -> set[fx.Node]:
    """The nodes with an effect on the logits; some models make unread masks."""
    output = next(node for node in graph.nodes if node.op == "output")
    live, left = set[fx.Node](), [output.args[0][0]]
    while left:
        node = left.pop()
        if node not in live:
            live.add(node)
            left += [node.args[0]] if is_whole(node) else node.all_input_nodes
    return live


def is_whole(node: fx.Node) -> bool:
    """True for a slice of everything: ``x[:, -T:]`` of T tokens, as layers cut off what a cache put in front."""
    return (
        node.target is aten.slice.Tensor
        and any(isinstance(a, fx.Node) for a in node.args[1:])
        and node.meta["val"].shape == node.args[0].meta["val"].shape
    )


class Flattener:
    """Copies node by node; ``new`` maps exported nodes to copies, ``flat`` holds nodes without the batch dimension."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.graph = fx.Graph()
        self.new: dict[fx.Node, Any] = {}
        self.flat: set[fx.Node] = set()
        self.weights: dict[str, Weight] = {}
        self.states: list[StateSpec] = []
        self.pools: dict[tuple[fx.Node, fx.Node], tuple[fx.Node, ...]] = {}  # of exported K and V
        self.inputs = {name: self.graph.placeholder(name) for name in BATCH_INPUTS}
        self.last_input = self.inputs["logits_index"]
        self.origins = checkpoint_origins(captured.model)

    def run(self) -> Graph:
        signature = self.captured.program.graph_signature
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers,
                 **signature.inputs_to_lifted_tensor_constants}  # fmt: skip
        users = iter(("input_ids", "positions", "logits_index"))
        live = read_by_output(self.captured.program.graph)
        for node in self.captured.program.graph.nodes:
            if node.op == "placeholder":
                if node.name in names:
                    self.new[node] = self.weight(names[node.name])
                else:
                    self.user_input(node, next(users))
            elif node.op == "call_function" and node in live:
                self.call(node)
            elif node.op == "output":
                self.graph.output(self.new[node.args[0][0]])
        return self.finish()

    def finish(self) -> Graph:
        if not self.states:
            raise UnsupportedModel(OUTSIDE_INTERFACE, where=self.captured.config.model_type)
        config = self.captured.config
        meta = GraphMeta(
            model_type=config.model_type,
            vocab_size=int(config.vocab_size),
            max_model_len=longest_context(config),
            states=tuple(self.with_window(spec) for spec in self.states),
            input_embedding=self.embedding_name,
            output_embedding=self.head_name,
        )
        graph = Graph(self.graph, self.weights, meta)
        graph.prune()
        return graph

    def with_window(self, spec: StateSpec) -> StateSpec:
        """``spec`` with the longest window of the layers that read its pools."""
        readers = [n for n in self.graph.nodes if n.target in ATTENTION and n.all_input_nodes]
        mine = [visible(n) for n in readers if spec.inputs[0] in (str(a.target) for a in n.all_input_nodes)]
        window = 0 if 0 in mine else max(mine, default=0)
        return replace(spec, window=window) if isinstance(spec, KVSpec) else spec

    # -- inputs and weights ------------------------------------------------------------------------------

    def user_input(self, node: fx.Node, name: str) -> None:
        self.new[node] = self.inputs[name]
        self.inputs[name].meta.update(shape=(None,), dtype=torch.int64)
        if name != "logits_index":
            self.flat.add(node)

    def weight(self, exported_name: str) -> fx.Node:
        """A ``get_attr`` node; tied weights get the input embedding's name, as in checkpoints."""
        model = self.captured.model
        program = self.captured.program
        name = exported_name.removeprefix("model.")
        value = program.state_dict.get(exported_name, program.constants.get(exported_name))
        embedding = model.get_input_embeddings().weight
        parameters = dict(model.named_parameters(remove_duplicate=False))
        if parameters.get(name) is embedding:
            name = self.embedding_name
        in_checkpoint = name in parameters
        if name not in self.weights:
            detached = value.detach()
            self.weights[name] = Weight(detached, self.origin(name, detached) if in_checkpoint else None)
        node = self.graph.create_node("get_attr", name, name=name.replace(".", "_"))
        node.meta.update(shape=tuple(value.shape), dtype=value.dtype)
        return node

    def origin(self, name: str, value: Tensor) -> Origin:
        """The checkpoint tensors of parameter ``name``; experts [E, N, K] without ``expert_linear`` are one tensor."""
        rows = value.shape[0] if value.ndim else 1
        found = self.origins.get(name)
        if found is not None and not found.stacked and sum(part.rows for part in found.parts) == rows:
            return found
        return Origin((Part(found.parts[0].name if found is not None and found.stacked else name, rows),))

    @property
    def embedding_name(self) -> str:
        return self.module_path(self.captured.model.get_input_embeddings()) + ".weight"

    @property
    def head_name(self) -> str:
        return self.module_path(self.captured.model.get_output_embeddings())

    def module_path(self, module: Any) -> str:
        return next(name for name, m in self.captured.model.named_modules() if m is module)

    # -- calls -------------------------------------------------------------------------------------------

    def call(self, node: fx.Node) -> None:
        if node.target in DROPPED:
            return
        if is_whole(node):
            self.same(node)
        elif node.target is torch.ops.optkit.attention.default:
            self.attention(node)
        elif state_wiring.is_recurrent(node):
            self.recurrent(node)
        elif node.target is torch.ops.optkit.expert_linear.default:
            self.expert_linear(node)
        elif node.target is torch.ops.optkit.weighted_sum.default:
            self.copy(node, reference.weighted_sum, node.args)
        elif node.target is operator.getitem:
            self.getitem(node)
        elif not isinstance(node.meta.get("val"), (Tensor, tuple, list)):
            self.scalar(node)
        else:
            self.tensor_call(node)

    def tensor_call(self, node: fx.Node) -> None:
        if op_name(node.target) is None and (value := self.constant(node)) is not None:
            name = f"constants.{node.name}"
            self.weights[name] = Weight(value, None)
            self.new[node] = self.graph.create_node("get_attr", name, name=name.replace(".", "_"))
            self.note_shape(node, self.new[node])
            return
        if op_name(node.target) is None:
            raise UnsupportedModel(
                f"it uses the op {node.target}, which is not on optkit's list",
                where=self.captured.config.model_type,
            )
        args = self.shifted_arguments(node)
        if args is None:
            self.wrapped(node)
        else:
            self.copy(node, node.target, args)

    def constant(self, node: fx.Node) -> Tensor | None:
        """The value of a node computed from constants of the model's code alone, else None."""
        program = self.captured.program
        if node.op == "placeholder":
            name = program.graph_signature.inputs_to_lifted_tensor_constants.get(node.name)
            return program.constants.get(name) if name else None
        known = {a: self.constant(a) for a in node.all_input_nodes} if node.op == "call_function" else {}
        if not known or any(value is None for value in known.values()):
            return None
        result = node.target(*fx.map_arg(node.args, known.get), **fx.map_arg(node.kwargs, known.get))
        return result if isinstance(result, Tensor) else None

    def shifted_arguments(self, node: fx.Node) -> tuple[Any, ...] | None:
        """The arguments for flat inputs, or None when the node needs wrapping."""
        flat_inputs = [a for a in node.all_input_nodes if a in self.flat]
        out_flat = is_flat_shape(node)
        if node.target in SIZE_OPS:
            grows = node.target is aten.expand.default and node.args[0] not in self.flat and out_flat
            return None if grows else (node.args[0], sizes_of(node, out_flat))
        if not flat_inputs and not out_flat:
            return node.args
        if node.target is aten.transpose.int or node.target in DIM_ARGUMENT:
            return self.shifted_dims(node, out_flat)
        if node.target in ELEMENTWISE:
            return node.args if self.broadcasts(node, out_flat) else None
        if node.target is aten.embedding.default:
            return node.args
        if node.target is aten.index.Tensor:
            return self.shifted_index(node)
        if node.target in ROW_OPS and node.args[0] in self.flat and len(flat_inputs) == 1:
            return node.args
        return None

    def broadcasts(self, node: fx.Node, out_flat: bool) -> bool:
        """True when the flat inputs still broadcast to the flat output's rank."""
        ranks = [rank(a) - (a in self.flat) for a in node.all_input_nodes if rank(a) is not None]
        return max(ranks) == rank(node) - out_flat

    def shifted_dims(self, node: fx.Node, out_flat: bool) -> tuple[Any, ...] | None:
        first = node.args[0]
        tensors = list(first) if isinstance(first, (list, tuple)) else [first]
        if len({t in self.flat for t in tensors}) > 1 or (tensors[0] in self.flat) != out_flat:
            return None
        ndim = rank(tensors[0]) + (node.target in ADDS_DIMENSION)
        positions = [1, 2] if node.target is aten.transpose.int else [DIM_ARGUMENT[node.target][0]]
        args = list(node.args)
        if not out_flat:
            return tuple(args)
        for position in positions:
            dims = args[position] if position < len(args) else DIM_ARGUMENT[node.target][1]
            shifted = shift(dims, ndim)
            if shifted is None:
                return None
            args += [None] * (position + 1 - len(args))
            args[position] = shifted
        return tuple(args)

    def shifted_index(self, node: fx.Node) -> tuple[Any, ...] | None:
        """``x[:, rows]`` with x flat is ``x[rows]``."""
        x, index = node.args[0], node.args[1]
        if x in self.flat and index[0] is None and not any(i in self.flat for i in index if i is not None):
            return (x, list(index[1:]))
        return None

    def wrapped(self, node: fx.Node) -> None:
        """Run a node without a rule on the original shapes."""

        def lift(arg: fx.Node) -> Any:
            new = self.new[arg]
            return self.graph.call_function(aten.unsqueeze.default, (new, 0)) if arg in self.flat else new

        args = fx.map_arg(node.args, lift)
        kwargs = fx.map_arg(portable_kwargs(node), lift)
        out = self.graph.call_function(node.target, args, kwargs)
        if is_flat_shape(node) and isinstance(node.meta["val"], Tensor):
            out = self.graph.call_function(aten.select.int, (out, 0, 0))
            self.flat.add(node)
        self.new[node] = out
        self.note_shape(node, out)

    def getitem(self, node: fx.Node) -> None:
        """Copy an output of a multi-output op; outputs of a wrapped op still have the batch dimension."""
        source = node.args[0]
        new = self.graph.call_function(operator.getitem, (self.new[source], node.args[1]))
        if is_flat_shape(node):
            self.flat.add(node)
            if source not in self.flat:
                new = self.graph.call_function(aten.select.int, (new, 0, 0))
        self.new[node] = new
        self.note_shape(node, new)

    def copy(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
        new_args = fx.map_arg(args, lambda a: self.new[a])
        kwargs = fx.map_arg(portable_kwargs(node), lambda a: self.new[a])
        self.new[node] = self.graph.call_function(target, new_args, kwargs)
        if is_flat_shape(node):
            self.flat.add(node)
        self.note_shape(node, self.new[node])

    def note_shape(self, node: fx.Node, new: fx.Node) -> None:
        """Static sizes (None where dynamic) and dtype, which canonicalization looks at."""
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            sizes = list(value.shape)[int(node in self.flat) :]
            new.meta["shape"] = tuple(s if isinstance(s, int) else None for s in sizes)
            new.meta["dtype"] = value.dtype

    def same(self, node: fx.Node) -> None:
        """Let the readers of ``node`` read its input."""
        source = node.args[0]
        self.new[node] = self.new[source]
        if source in self.flat:
            self.flat.add(node)

    def expert_linear(self, node: fx.Node) -> None:
        """Copy a projection of experts; its weight becomes the rows of all experts."""
        x, weight, bias, experts, transposed = node.args
        num_experts = int(weight.meta["val"].shape[0])
        operands = [None if w is None else self.stacked_rows(self.new[w], transposed) for w in (weight, bias)]
        self.copy(node, reference.expert_linear, (x, weight, bias, experts))
        new = self.new[node]
        new.args, new.kwargs = (new.args[0], *operands, new.args[3]), {"num_experts": num_experts}

    def stacked_rows(self, node: fx.Node, transposed: bool) -> fx.Node:
        """The weight [E * N, K] or bias [E * N] of experts, from a parameter [E, N, K], [E, K, N] or [E, N]."""
        name = str(node.target)
        new = f"{name.removesuffix('_bias')}.bias" if name.endswith("_bias") else f"{name}.weight"
        if new not in self.weights:
            value = self.weights.pop(name).value
            transposed = transposed and value.ndim == 3
            rows = (value.transpose(1, 2) if transposed else value).flatten(0, 1)
            origin = self.origins.get(name)
            if origin is None or transposed:
                origin = Origin((Part(name, len(rows)),), transposed, stacked=len(value))
            self.weights[new] = Weight(rows, origin)
        return self.graph.create_node("get_attr", new, name=new.replace(".", "_"))

    def scalar(self, node: fx.Node) -> None:
        """Copy symbolic sizes and arithmetic on sizes; a flat tensor's dimension moves down by 1."""
        args = list(node.args)
        if node.target is aten.sym_size.int:
            args[1] = args[1] - (args[0] in self.flat)
        elif node.target not in SCALAR_OPS.values():
            name = getattr(node.target, "__name__", str(node.target))
            raise UnsupportedModel(f"it computes {name} on sizes", where=self.captured.config.model_type)
        self.new[node] = self.graph.call_function(node.target, tuple(fx.map_arg(args, lambda a: self.new[a])))

    def new_input(self, name: str) -> fx.Node:
        with self.graph.inserting_after(self.last_input):
            self.last_input = self.graph.placeholder(name)
        return self.last_input

    def attention(self, node: fx.Node) -> None:
        """Wire the KV pool and the batch metadata to the attention node of a layer.

        A layer with K and V of an earlier layer reads the earlier layer's pools.
        """
        q, k, v, sinks, slopes, scale, window, softcap, chunk, layer = node.args
        writes = (k, v) not in self.pools
        if writes:
            self.pools[k, v] = self.new_pools(k, v, layer)
        numbers = [self.new[x] if isinstance(x, fx.Node) else x for x in (sinks, slopes)]
        while numbers and numbers[-1] is None:
            numbers.pop()
        batch = ("slot_mapping",) * writes + ("query_start", "seq_lens", "block_tables")
        args = (self.as_rows(q), *self.pools[k, v], *(self.inputs[n] for n in batch), *numbers)
        options = {"scale": scale, "window": window, "softcap": softcap} | ({"chunk": chunk} if chunk else {})
        op = reference.attention if writes else reference.paged_attention
        out = self.graph.call_function(op, args, options)
        out.meta["kernel"] = PLAIN
        self.new[node] = out
        self.flat.add(node)
        self.note_shape(node, out)

    def as_rows(self, heads: fx.Node) -> fx.Node:
        """[T, H, D] of [H, T, D]."""
        return self.graph.call_function(aten.transpose.int, (self.new[heads], 0, 1))

    def new_pools(self, k: fx.Node, v: fx.Node, layer: int) -> tuple[fx.Node, ...]:
        """K, V and the pools of ``layer``, of which each token's row is written once."""
        if any(spec.layer == layer for spec in kv_of(self.states)):
            raise UnsupportedModel(
                f"two attentions have the layer number {layer}, and KV is cached by layer",
                where=self.captured.config.model_type,
            )
        (_, kv, _, k_dim), v_dim = k.meta["val"].shape, v.meta["val"].shape[3]
        self.states.append(KVSpec(layer, int(kv), int(k_dim), int(v_dim)))
        caches = [self.new_input(f"{c}_cache_{layer}") for c in "kv"]
        return self.as_rows(k), self.as_rows(v), *caches

    def recurrent(self, node: fx.Node) -> None:
        """Wire the pool of states and the batch metadata to a recurrent op of a layer."""
        state = state_wiring.state_of(node, self.states)
        self.states.append(state)
        rows = [self.new[a] if isinstance(a, fx.Node) else a for a in state_wiring.operands(node)]
        batch = [self.inputs[name] for name in ("query_start", "seq_lens")]
        pools = [self.new_input(state.inputs[0]), *batch, self.state_slots()]
        target = state_wiring.RECURRENT[node.target].op
        self.new[node] = self.graph.call_function(target, (*rows, *pools), state_wiring.options(node))
        self.flat.add(node)
        self.note_shape(node, self.new[node])

    def state_slots(self) -> fx.Node:
        """The batch input of graphs with recurrent states, made for the first."""
        if STATE_SLOTS not in self.inputs:
            self.inputs[STATE_SLOTS] = self.new_input(STATE_SLOTS)
        return self.inputs[STATE_SLOTS]


def longest_context(config: Any) -> int:
    """Tokens of the longest sequence, 2,048 where the configuration has no number."""
    return next((int(n) for name in CONTEXT if (n := getattr(config, name, None))), 2048)


def is_flat_shape(node: fx.Node) -> bool:
    """True for a value with a leading dimension of exactly 1 and at least two dimensions: the copy drops the first.

    A multi-output node is flat when all outputs are.
    """
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return all(
        isinstance(v, Tensor) and v.ndim >= 2 and isinstance(v.shape[0], int) and v.shape[0] == 1
        for v in values
    )


def rank(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value.ndim if isinstance(value, Tensor) else None


def shift(dims: Any, ndim: int) -> Any:
    """Dimensions of [1, ...] as dimensions of [...]; None for the dropped dimension."""
    if isinstance(dims, (list, tuple)):
        shifted = [shift(d, ndim) for d in dims]
        return None if None in shifted else shifted
    if dims < 0:
        return None if dims == -ndim else dims  # counted from the end, nothing moves
    return None if dims == 0 else dims - 1


def sizes_of(node: fx.Node, out_flat: bool) -> list[Any]:
    """Static sizes of a view with -1 for a single dynamic dimension; the original arguments for several."""
    shape = list(node.meta["val"].shape)[int(out_flat) :]
    dynamic = [i for i, size in enumerate(shape) if not isinstance(size, int)]
    if len(dynamic) > 1 or node.target is aten.expand.default:
        return list(node.args[1])[int(out_flat) :]
    return [-1 if i in dynamic else size for i, size in enumerate(shape)]


def portable_kwargs(node: fx.Node) -> dict[str, Any]:
    """Keyword arguments without device and layout, which belong to the executor."""
    return {k: v for k, v in node.kwargs.items() if k not in PLACEMENT}
