"""Rewrites that only pay on a GPU: a flat list, in order. Each puts one launch in the place of two or three.

On a GPU an op is a kernel launch and a round trip through memory, so the quantization of activations belongs into the
kernel that has the row in registers: the norm or the gate before it. On a CPU that fusion is the program's
(``optkit.lowering.launch_plan``), and the graph says nothing of it. Hence lowering steps and not passes: the
artifact stays the same for every target. A fusion is exact: the reference gives the same numbers before and after.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from optkit.graph.ir import Graph
from optkit.kernels import reference

if TYPE_CHECKING:
    from optkit.machine.target import Target


def rewrite(graph: Graph, target: Target) -> None:
    """Apply every rewrite that helps on ``target``, in place."""
    if target.fp8_flops:
        quantize_apart(graph)
    share_quantization(graph)
    fuse_quantization(graph)
    fuse_rope(graph)
    graph.prune()


def quantize_apart(graph: Graph) -> None:
    """``linear_fp8`` that rounds each token: the rounding becomes an op of its own, which others can share or fuse."""
    for node in graph.calls(reference.linear_fp8):
        x, weight, scale, input_scale, *bias = node.args
        rowwise = graph.weights[str(scale.target)].value.shape[1] == 1 and input_scale is None
        if not rowwise or node.kwargs.get("activations", "token") != "token":
            continue
        with graph.fx.inserting_before(node):
            rounded = graph.fx.call_function(reference.quantize_fp8_per_token, (x,))
            q, s = items(graph, rounded, 2)
            product = graph.fx.call_function(reference.linear_fp8_rowwise, (q, s, weight, scale, *bias))
        replace(graph, node, product)


def share_quantization(graph: Graph) -> None:
    """Several quantizations of one activation in one format become one."""
    first: dict[Any, fx.Node] = {}
    for node in graph.calls(reference.quantize_fp8_per_token, reference.quantize_per_token):
        key = (node.target, node.args, tuple(node.kwargs.items()))
        if first.setdefault(key, node) is not node:
            replace(graph, node, first[key])


def fuse_quantization(graph: Graph) -> None:
    """A norm or a gate whose result is quantized per token writes the quantized rows itself."""
    for node in graph.calls(reference.quantize_fp8_per_token, reference.quantize_per_token):
        if group_size(node):
            continue
        producer = node.args[0]
        fuse = FUSIONS.get(producer.target)
        if fuse is not None and list(producer.users) == [node]:
            fuse(graph, producer, node, "int8" if node.target is reference.quantize_per_token else "fp8")


def fuse_norm(graph: Graph, norm: fx.Node, quantize: fx.Node, fmt: str) -> None:
    with graph.fx.inserting_before(quantize):
        fused = graph.fx.call_function(reference.rms_norm_quantize, norm.args, {**norm.kwargs, "fmt": fmt})
    replace(graph, quantize, fused)


def fuse_gate(graph: Graph, gate: fx.Node, quantize: fx.Node, fmt: str) -> None:
    op = (
        reference.silu_mul_quantize
        if gate.target is reference.silu_mul_packed
        else reference.gelu_mul_quantize
    )
    options = dict(zip(("gate_up", "approximate"), gate.args, strict=False)) | gate.kwargs
    gate_up = options.pop("gate_up")
    with graph.fx.inserting_before(quantize):
        fused = graph.fx.call_function(op, (gate_up,), {**options, "fmt": fmt})
    replace(graph, quantize, fused)


def fuse_add_norm(graph: Graph, normed: fx.Node, quantize: fx.Node, fmt: str) -> None:
    """``normed`` is the first result of an ``add_rms_norm``; its second, the sum, moves to the third place."""
    norm = normed.args[0]
    if norm.target is not reference.add_rms_norm or normed.args[1] != 0:
        return
    with graph.fx.inserting_before(norm):
        fused = graph.fx.call_function(
            reference.add_rms_norm_quantize, norm.args, {**norm.kwargs, "fmt": fmt}
        )
        q, s, total = items(graph, fused, 3)
    for user in list(quantize.users):
        user.replace_all_uses_with((q, s)[user.args[1]])
    for user in list(norm.users):
        if user.args[1] == 1:
            user.replace_all_uses_with(total)
    graph.prune()


def fuse_rope(graph: Graph) -> None:
    """Where attention reads rotated q and k: rotation and KV write in one op, then attention over the cache alone."""
    for node in graph.calls(reference.attention):
        q, k, v, k_cache, v_cache, slots, *batch = node.args
        rotated = q.target is k.target is reference.rope and q.args[1:] == k.args[1:]
        if not rotated or node.meta.get("kernel") == "reference":
            continue
        with graph.fx.inserting_before(node):
            arguments = (q.args[0], k.args[0], v, *q.args[1:], k_cache, v_cache, slots)
            written = graph.fx.call_function(reference.rope_kv_write, arguments)
            new_q, new_k = items(graph, written, 2)
            attended = graph.fx.call_function(
                reference.paged_attention, (new_q, new_k, v, k_cache, v_cache, *batch), node.kwargs
            )
        replace(graph, node, attended)


FUSIONS: dict[Any, Callable[[Graph, fx.Node, fx.Node, str], None]] = {
    reference.rms_norm: fuse_norm,
    reference.silu_mul_packed: fuse_gate,
    reference.gelu_mul_packed: fuse_gate,
    operator.getitem: fuse_add_norm,
}


def group_size(quantize: fx.Node) -> int:
    """0 for one scale a token, else the channels that share one."""
    return quantize.kwargs.get("group_size", (*quantize.args, 0)[1])


def items(graph: Graph, node: fx.Node, count: int) -> Sequence[fx.Node]:
    """The results of ``node``, each a node, at the place where new nodes go."""
    return [graph.fx.call_function(operator.getitem, (node, i)) for i in range(count)]


def replace(graph: Graph, old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    graph.fx.erase_node(old)
