"""Rewrites for GPUs: a flat list, in order. A rewrite puts a single launch in the place of two or three.

On a GPU an op is a kernel launch and a round trip through memory, so the quantization of activations belongs to the
kernel with the row in registers: the norm or the gate before the linear layer. On a CPU a program fuses the two
(``optkit.lowering.launch_plan``). So the rewrites are lowering steps and not passes: the artifact is the same for
every target. A fusion is exact: the reference gives the same numbers before and after.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.kernels import reference

if TYPE_CHECKING:
    from optkit.machine.target import Target

FP8_OPERANDS = ("x", "weight", "weight_scale", "input_scale", "bias")
SEQUENCES = ("query_start", "seq_lens", "block_tables")


def rewrite(graph: Graph, target: Target) -> None:
    """Apply every rewrite with a gain on ``target``, in place."""
    if target.fp8_flops:
        quantize_apart(graph)
    share_quantization(graph)
    fuse_quantization(graph)
    fuse_rope(graph)
    graph.prune()


def quantize_apart(graph: Graph) -> None:
    """Split ``linear_fp8`` with a scale a token into quantization and product; the quantization can then be shared or
    fused.
    """
    for node in graph.calls(reference.linear_fp8):
        x, weight, scale, input_scale, bias = (ops.argument(node, name) for name in FP8_OPERANDS)
        rowwise = graph.weights[str(scale.target)].shape[1] == 1 and input_scale is None
        if not rowwise or ops.argument(node, "activations") != "token":
            continue
        with graph.fx.inserting_before(node):
            rounded = graph.fx.call_function(reference.quantize_fp8_per_token, (x,))
            q, s = items(graph, rounded, 2)
            product = graph.fx.call_function(reference.linear_fp8_rowwise, (q, s, weight, scale, bias))
        replace(graph, node, product)


def share_quantization(graph: Graph) -> None:
    """Merge quantizations of the same activation in the same format."""
    first: dict[Any, fx.Node] = {}
    for node in graph.calls(reference.quantize_fp8_per_token, reference.quantize_per_token):
        key = (node.target, node.args, tuple(node.kwargs.items()))
        if first.setdefault(key, node) is not node:
            replace(graph, node, first[key])


def fuse_quantization(graph: Graph) -> None:
    """Fuse the quantization of a token's row into the norm or gate before it."""
    for node in graph.calls(reference.quantize_fp8_per_token, reference.quantize_per_token):
        if node.target is reference.quantize_per_token and ops.argument(node, "group_size"):
            continue
        producer, fmt = ops.activation(node), "int8" if node.target is reference.quantize_per_token else "fp8"
        if list(producer.users) != [node]:
            continue
        if producer.target is operator.getitem:
            fuse_add_norm(graph, producer, node, fmt)
        elif (op := ops.record_of(producer.target)) and op.quantized:
            fuse(graph, producer, node, fmt)


def fuse(graph: Graph, producer: fx.Node, quantize: fx.Node, fmt: str) -> None:
    """Replace ``producer`` and ``quantize`` by a single op."""
    with graph.fx.inserting_before(quantize):
        fused = call_quantized(graph, producer, fmt)
    replace(graph, quantize, fused)


def call_quantized(graph: Graph, node: fx.Node, fmt: str) -> fx.Node:
    """A call of the quantizing form of ``node``'s op on the same arguments: tensors by position, options by name."""
    op = ops.op_of(node)
    tensors = tuple(op.argument(node, operand.name) for operand in op.tensors)
    given = (*list(op.positions)[: len(node.args)], *node.kwargs)
    options = {name: op.argument(node, name) for name in given if op.positions[name] >= len(tensors)}
    return graph.fx.call_function(op.quantized, tensors, {**options, "fmt": fmt})


def fuse_add_norm(graph: Graph, normed: fx.Node, quantize: fx.Node, fmt: str) -> None:
    """Fuse an ``add_rms_norm`` and the quantization of ``normed``, the first result; the sum becomes the third
    result.
    """
    norm, index = normed.args
    if norm.target is not reference.add_rms_norm or index != 0:
        return
    with graph.fx.inserting_before(norm):
        fused = call_quantized(graph, norm, fmt)
        q, s, total = items(graph, fused, 3)
    for user in list(quantize.users):
        user.replace_all_uses_with((q, s)[user.args[1]])
    for user in list(norm.users):
        if user.args[1] == 1:
            user.replace_all_uses_with(total)
    graph.prune()


def fuse_rope(graph: Graph) -> None:
    """Replace rotation and attention by two ops: rotation with KV write, and attention over the cache."""
    for node in graph.calls(reference.attention):
        q, k, v, k_cache, v_cache = (
            ops.argument(node, name) for name in ("q", "k", "v", "k_cache", "v_cache")
        )
        rotated = q.target is k.target is reference.rope and angles(q) == angles(k)
        if not rotated or v_cache is None or node.meta.get("kernel") == "reference":
            continue
        with graph.fx.inserting_before(node):
            slots = ops.argument(node, "slot_mapping")
            arguments = (ops.activation(q), ops.activation(k), v, *angles(q), k_cache, v_cache, slots)
            written = graph.fx.call_function(reference.rope_kv_write, arguments)
            new_q, new_k = items(graph, written, 2)
            batch = [ops.argument(node, name) for name in SEQUENCES]
            scores = node.args[ops.op_of(node).positions["sinks"] :]
            attended = graph.fx.call_function(
                reference.paged_attention,
                (new_q, new_k, v, k_cache, v_cache, *batch, *scores),
                node.kwargs,
            )
        for reader in (user for user in k.users if user.target is reference.paged_attention):
            reader.replace_input_with(k, new_k)  # a layer that shares K and V
        replace(graph, node, attended)


def angles(rope: fx.Node) -> tuple[Any, Any]:
    """The cosines and sines of a rotation."""
    return ops.argument(rope, "cos"), ops.argument(rope, "sin")


def items(graph: Graph, node: fx.Node, count: int) -> Sequence[fx.Node]:
    """The results of ``node``, each a node, at the place where new nodes go."""
    return [graph.fx.call_function(operator.getitem, (node, i)) for i in range(count)]


def replace(graph: Graph, old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    graph.fx.erase_node(old)
