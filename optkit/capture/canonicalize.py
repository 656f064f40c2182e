"""From flattened aten to the dialect: a flat list of named rewrites, run in order.

Each rewrite is a function ``Graph -> int`` with the number of changed sites as result. A node outside of all rewrites
stays a listed aten op and still runs, so a missed idiom costs speed, not correctness.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from optkit.capture.nodes import emit, is_call, is_last_dim, operands, replace
from optkit.capture.transposes import cancel_transposes, hoist_transposes, rows_of_columns
from optkit.graph.ir import Graph, Origin, Weight
from optkit.graph.ops import GATED, record_of
from optkit.graph.ops.attention import ATTENTION
from optkit.kernels import reference

aten = torch.ops.aten
IDENTITY_OPS = (aten.clone.default, aten.alias.default, aten.type_as.default, aten._to_copy.default)
LAYOUT_OPS = (
    aten.unsqueeze.default, aten.select.int, aten.expand.default, aten.transpose.int, aten._to_copy.default,
)  # fmt: skip
GELU_TANH_SCALE = 0.7978845608028654  # sqrt(2 / pi)


def canonicalize(graph: Graph) -> Graph:
    """Raise idioms to dialect ops, in place; returns the graph."""
    for rewrite in REWRITES:
        rewrite(graph)
        graph.prune()
    while sum(rewrite(graph) for rewrite in CLEANUPS):
        graph.prune()
    fold_constants(graph)
    graph.prune()
    return graph


# -- rewrites --------------------------------------------------------------------------------------------


def drop_identities(graph: Graph) -> int:
    """Casts to the dtype a value already has, and copies: the graph is functional."""
    count = 0
    for node in graph.calls(*IDENTITY_OPS):
        source = node.args[0]
        if source.meta.get("dtype") is not None and source.meta["dtype"] == node.meta.get("dtype"):
            replace(node, source)
            count += 1
    return count


def raise_linear(graph: Graph) -> int:
    """``aten.linear`` and ``addmm`` with a [in, out] weight (Conv1D) become ``linear`` with [out, in]."""
    count = 0
    for node in graph.calls(aten.linear.default, aten.addmm.default):
        if node.target is aten.linear.default:
            new = emit(graph, node, reference.linear, *node.args)
        else:
            bias, x, weight = node.args
            if not (isinstance(weight, fx.Node) and weight.op == "get_attr"):
                continue
            transpose_weight(graph, str(weight.target))
            new = emit(graph, node, reference.linear, x, weight, bias)
        replace(node, new)
        count += 1
    return count


def transpose_weight(graph: Graph, name: str) -> None:
    """Store a Conv1D weight as [out, in] and mark the origin as transposed."""
    weight = graph.weights[name]
    if weight.origin is not None and not weight.origin.transposed:
        value = weight.value.T  # zeros in the place of a weight on disk stay a single number
        value = value if 0 in value.stride() else value.contiguous()
        graph.weights[name] = Weight(value, Origin(weight.origin.parts, transposed=True))


def raise_embedding(graph: Graph) -> int:
    nodes = list(graph.calls(aten.embedding.default))
    for node in nodes:
        replace(node, emit(graph, node, reference.embedding, node.args[0], node.args[1]))
    return len(nodes)


def raise_layer_norm(graph: Graph) -> int:
    count = 0
    for node in graph.calls(aten.layer_norm.default):
        x, shape, weight, bias, eps = (*node.args, *[None] * 5)[:5]
        if len(shape) == 1:
            epsilon = eps if eps is not None else 1e-5
            replace(node, emit(graph, node, reference.layer_norm, x, weight, bias, epsilon))
            count += 1
    return count


def raise_rms_norm(graph: Graph) -> int:
    """Raise ``x * rsqrt(mean(x^2) + eps)``, with a following weight (or ``1 + weight``, Gemma), to ``rms_norm``."""
    count = 0
    for root in graph.calls(aten.rsqrt.default, aten.pow.Tensor_Scalar):
        found = match_rms(root) if root.args[1:] in ((), (-0.5,)) else None
        if found is None:
            continue
        x, eps, normed = found
        weight, offset, last = match_scale(graph, normed)
        new = emit(graph, last, reference.rms_norm, x, weight, eps, **({"offset": offset} if offset else {}))
        replace(last, new)
        count += 1
    return count


def match_rms(root: fx.Node) -> tuple[fx.Node, float, fx.Node] | None:
    added = operands(root.args[0], aten.add.Tensor, lambda a: is_call(a, aten.mean.dim))
    if added is None or not isinstance(added[1], float):
        return None
    mean, eps = added
    square = mean.args[0]
    if not (is_call(square, aten.pow.Tensor_Scalar) and square.args[1] == 2):
        return None
    if not (is_last_dim(square, mean.args[1]) and mean.args[2:] == (True,)):
        return None
    x = square.args[0]
    for user in root.users:
        if is_call(user, aten.mul.Tensor) and set(user.args) == {x, root}:
            return x, eps, user
    return None


def match_scale(graph: Graph, normed: fx.Node) -> tuple[Any, float, fx.Node]:
    """The weight of a normalized value: (weight, offset, node to replace)."""
    if len(normed.users) == 1:
        user = next(iter(normed.users))
        pair = operands(user, aten.mul.Tensor, lambda a: a is normed)
        if pair is not None:
            scale = pair[1]
            if is_vector_weight(graph, scale):
                return scale, 0.0, user
            shifted = operands(scale, aten.add.Tensor, lambda a: is_vector_weight(graph, a))
            if shifted is not None and isinstance(shifted[1], (int, float)):
                return shifted[0], float(shifted[1]), user
    return None, 0.0, normed


def is_vector_weight(graph: Graph, node: Any) -> bool:
    weight = graph.weight_of(node)
    return weight is not None and weight.stored.ndim == 1


def raise_gelu_tanh(graph: Graph) -> int:
    """GPT-2's written-out tanh approximation of GELU (arXiv 1606.08415)."""
    count = 0
    for node in graph.calls(aten.tanh.default):
        found = match_gelu_tanh(node)
        if found is not None:
            x, last = found
            replace(last, emit(graph, last, aten.gelu.default, x, approximate="tanh"))
            count += 1
    return count


def match_gelu_tanh(tanh: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    inner = operands(tanh.args[0], aten.mul.Tensor, lambda a: is_call(a, aten.add.Tensor))
    if inner is None or inner[1] != GELU_TANH_SCALE:
        return None
    summed = operands(inner[0], aten.add.Tensor, lambda a: not is_call(a, aten.mul.Tensor))
    if summed is None:
        return None
    x, cube = summed
    if not (is_call(cube, aten.mul.Tensor) and is_call(cube.args[0], aten.pow.Tensor_Scalar)):
        return None
    plus_one = next(iter(tanh.users))
    last = next(iter(plus_one.users), None)
    half = operands(last, aten.mul.Tensor, lambda a: a is plus_one)
    return (
        (x, last) if half is not None and is_call(half[1], aten.mul.Tensor) and half[1].args[0] is x else None
    )


def is_lone_call(target: Any, node: Any) -> bool:
    """A call of ``target`` with a single reader."""
    return is_call(node, target) and len(node.users) == 1


def raise_gated(graph: Graph) -> int:
    """``silu(gate) * up`` and ``gelu(gate) * up``."""
    count = 0
    for node in graph.calls(aten.mul.Tensor):
        for act, target in ((aten.silu.default, reference.silu_mul), (aten.gelu.default, reference.gelu_mul)):
            pair = operands(node, aten.mul.Tensor, partial(is_lone_call, act))
            if pair is not None and isinstance(pair[1], fx.Node):
                replace(node, emit(graph, node, target, pair[0].args[0], pair[1], **pair[0].kwargs))
                count += 1
                break
    return count


def raise_softplus(graph: Graph) -> int:
    """``log(1 + e^x)``, with a vector that is added before: the time steps of state-space layers."""
    count = 0
    for node in graph.calls(aten.softplus.default):
        x, *shape = node.args
        if shape not in ([], [1], [1, 20]) or not isinstance(x, fx.Node):  # beta and threshold
            continue
        given = shifted_by_vector(graph, x) if len(x.users) == 1 else None
        replace(node, emit(graph, node, reference.softplus, *(given or (x, None))))
        count += 1
    return count


def shifted_by_vector(graph: Graph, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """x and the weight of ``x + weight`` with a weight [K] and x [..., K]."""
    pair = operands(node, aten.add.Tensor, partial(is_vector_weight, graph))
    if pair is None or node.kwargs or not isinstance(pair[1], fx.Node):
        return None
    return (pair[1], pair[0]) if pair[1].meta.get("shape") == node.meta.get("shape") else None


def pack_gates_of_experts(graph: Graph) -> int:
    """A gated activation on the two halves of an expert's projection reads the projection itself."""
    count = 0
    for node in graph.calls(reference.silu_mul, reference.gelu_mul):
        source = halves_of(node)
        if source is not None and is_call(source, reference.expert_linear):
            replace(node, emit(graph, node, GATED[node.target], source, *node.args[2:], **node.kwargs))
            count += 1
    return count


def halves_of(node: fx.Node) -> fx.Node | None:
    """x where the two arguments of ``node`` are the first and the second half of x in the last dimension."""
    parts = node.args[:2]
    if not all(is_call(part, operator.getitem) for part in parts) or [p.args[1] for p in parts] != [0, 1]:
        return None
    split = parts[0].args[0]
    if parts[1].args[0] is not split or not is_call(split, aten.split.Tensor):
        return None
    width = split.args[0].meta.get("shape", (0,))[-1]
    return split.args[0] if split.args[1] * 2 == width and is_last_dim(split.args[0], split.args[2]) else None


def raise_rope_table(graph: Graph) -> int:
    """Cosines and sines of ``positions x inv_freq``; both halves equal, maybe scaled (YaRN)."""
    count = 0
    for item, target in enumerate((aten.cos.default, aten.sin.default)):
        for node in graph.calls(target):
            source = match_angles(graph, node.args[0])
            if source is None:
                continue
            last, scale = scaled(node)
            with graph.fx.inserting_before(node):
                table = graph.fx.call_function(reference.rope_table, (*source, scale))
                new = graph.fx.call_function(operator.getitem, (table, item))
            replace(last, new)
            count += 1
    return count


def match_angles(graph: Graph, angles: Any) -> tuple[fx.Node, fx.Node] | None:
    """Positions and inverse frequencies whose outer product [T, D/2] is both halves of ``angles`` [T, D].

    Newer Transformers multiply a column by a row, 5.17 and before a matrix by a matrix, over a dimension of size 1,
    and transpose. Either way positions and frequencies only change their layout on the way, so the shape of the
    product says the rest.
    """
    if not is_call(angles, aten.cat.default) or not is_last_dim(angles, angles.args[1]):
        return None
    first, second = (*angles.args[0], None)[:2]
    product = without_layout(first)
    if first is not second or not is_call(product, aten.mul.Tensor, aten.matmul.default):
        return None
    sources = sorted(map(without_layout, product.args), key=lambda node: is_vector_weight(graph, node))
    if not all(isinstance(node, fx.Node) for node in sources):
        return None
    positions, frequencies = sources
    if positions.name != "positions" or not is_vector_weight(graph, frequencies):
        return None
    outer = (None, graph.weights[str(frequencies.target)].shape[0])
    return (positions, frequencies) if first.meta.get("shape") == outer else None


def without_layout(node: Any) -> Any:
    """The value of ``node`` before casts, transposes, and dimensions of size 1."""
    while is_call(node, *LAYOUT_OPS):
        node = node.args[0]
    return node


def scaled(node: fx.Node) -> tuple[fx.Node, float]:
    users = list(node.users)
    if len(users) == 1 and is_call(users[0], aten.mul.Tensor) and isinstance(users[0].args[1], float):
        return users[0], users[0].args[1]
    return node, 1.0


def raise_rope(graph: Graph) -> int:
    """``x * cos + rotate_half(x) * sin`` on [H, T, D] becomes ``rope`` on [T, H, D] between transposes."""
    count = 0
    for node in graph.calls(aten.add.Tensor):
        found = match_rope(node)
        if found is not None:
            x, cos, sin = found
            rows = emit(graph, node, aten.transpose.int, x, 0, 1)
            rotated = emit(graph, node, reference.rope, rows, cos, sin)
            replace(node, emit(graph, node, aten.transpose.int, rotated, 0, 1))
            count += 1
    return count


def match_rope(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    for straight, turned in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
        right = operands(turned, aten.mul.Tensor, lambda a: is_call(a, aten.cat.default))
        if right is None:
            continue
        x = rotate_half_source(right[0])
        left = operands(straight, aten.mul.Tensor, partial(operator.is_, x))
        if x is None or left is None or len(x.meta.get("shape", ())) != 3:
            continue
        tables = [
            t.args[0] for t in (left[1], right[1]) if is_call(t, aten.unsqueeze.default) and t.args[1] == 0
        ]
        if len(tables) == 2 and all(len(t.meta.get("shape", ())) == 2 for t in tables):
            return x, tables[0], tables[1]
    return None


def rotate_half_source(cat: fx.Node) -> fx.Node | None:
    """x of ``cat(-x[half:], x[:half])``."""
    pieces = cat.args[0]
    if len(pieces) != 2 or not is_call(pieces[0], aten.neg.default):
        return None
    upper, lower = pieces[0].args[0], pieces[1]
    if not (is_call(upper, aten.slice.Tensor) and is_call(lower, aten.slice.Tensor)):
        return None
    x = upper.args[0]
    size = (x.meta.get("shape") or (0,))[-1]
    halves = lower.args[2:4] == (0, size // 2) and upper.args[2] == size // 2 and upper.args[3] >= size
    same = lower.args[0] is x and is_last_dim(x, upper.args[1]) and is_last_dim(x, lower.args[1])
    return x if same and halves else None


def raise_select_rows(graph: Graph) -> int:
    count = 0
    for node in graph.calls(aten.index.Tensor):
        x, index = node.args
        if len(index) == 1 and isinstance(index[0], fx.Node) and index[0].name == "logits_index":
            replace(node, emit(graph, node, reference.select_rows, x, index[0]))
            count += 1
    return count


# -- cleanups, repeated until nothing changes ------------------------------------------------------------


def fold_reshapes(graph: Graph) -> int:
    """Remove views without effect; merge a view of a view."""
    count = 0
    for node in graph.calls(aten.view.default, aten.reshape.default):
        source, sizes = node.args
        shape = source.meta.get("shape")
        same = shape is not None and shape == node.meta.get("shape") and shape.count(None) <= 1
        if same:
            replace(node, source)
            count += 1
        elif is_call(source, aten.view.default, aten.reshape.default) and not has_nodes(sizes):
            node.replace_input_with(source, source.args[0])
            count += 1
        elif node.target is aten.view.default:
            node.target = aten.reshape.default
            count += 1
    return count


def linears_of_rows(graph: Graph) -> int:
    """A linear layer of tokens with dimensions of 1, such as a latent of one head, becomes one of rows [T, K]."""
    count = 0
    for node in graph.calls(reference.linear):
        source, *weights = node.args
        shape: tuple[int | None, ...] = source.meta.get("shape") or ()
        sizes: tuple[int | None, ...] = node.meta.get("shape") or ()
        if len(shape) < 3 or len(sizes) != len(shape):
            continue
        if shape.count(None) != 1 or {*shape[:-1]} != {1, None}:
            continue
        rows = emit(graph, node, aten.reshape.default, source, [-1, shape[-1]])
        new = emit(graph, node, reference.linear, rows, *weights)
        out = emit(graph, node, aten.reshape.default, new, [-1 if size is None else size for size in sizes])
        for made, last in ((rows, shape[-1]), (new, sizes[-1])):
            made.meta.update(shape=(None, last), dtype=node.meta.get("dtype"))
        replace(node, out)
        count += 1
    return count


def has_nodes(sizes: Any) -> bool:
    return any(isinstance(size, fx.Node) for size in sizes)


def merge_equal_nodes(graph: Graph) -> int:
    """Common subexpressions, but for ops that read or write a state, since its pool changes between calls."""
    seen: dict[Any, fx.Node] = {}
    count = 0
    for node in list(graph.fx.nodes):
        op = record_of(node.target)
        stateful = node.target in ATTENTION or (op is not None and op.mutates)
        if node.op in ("placeholder", "output") or stateful:
            continue
        key = repr((node.op, str(node.target), node.args, sorted(node.kwargs.items())))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.fx.erase_node(node)
            count += 1
    return count


def fold_constants(graph: Graph, largest: int = 1 << 18) -> int:
    """Evaluate small expressions of weights alone; the results are constants of the graph."""
    count = 0
    for node in list(graph.fx.nodes):
        inputs = node.all_input_nodes
        known = [graph.weight_of(i) for i in inputs]
        if node.op != "call_function" or not inputs or None in known or is_dialect_linear(node):
            continue
        if sum(w.shape.numel() for w in known if w) > largest:
            continue
        values = dict(zip(inputs, (w.value for w in known if w), strict=True))
        result = node.target(*fx.map_arg(node.args, values.get), **fx.map_arg(node.kwargs, values.get))
        if isinstance(result, Tensor):
            name = f"constants.{node.name}"
            graph.weights[name] = Weight(result, None)
            replace(node, graph.weight_node(name, node))
            count += 1
    return count


def is_dialect_linear(node: fx.Node) -> bool:
    return node.target in (reference.linear, reference.embedding, reference.expert_linear)


REWRITES: tuple[Callable[[Graph], int], ...] = (
    drop_identities,
    merge_equal_nodes,
    raise_linear,
    raise_embedding,
    raise_layer_norm,
    raise_rms_norm,
    raise_gelu_tanh,
    raise_gated,
    raise_softplus,
    pack_gates_of_experts,
    raise_rope_table,
    raise_rope,
    raise_select_rows,
)
CLEANUPS: tuple[Callable[[Graph], int], ...] = (
    cancel_transposes,
    hoist_transposes,
    rows_of_columns,
    linears_of_rows,
    fold_reshapes,
    merge_equal_nodes,
)
