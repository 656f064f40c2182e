"""latent_kv: attention over latents, so that the KV cache holds a latent for each token in place of all heads' K and V.

Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1) computes keys and values of all heads
from a latent c of a token by one matrix: ``k_h = [W_UK,h c, r]`` and ``v_h = W_UV,h c``, where r, the rotated part of
the key, is the same for all heads. Captured as written, the cache holds k and v of every head. The scores of a head are

    q_h . k_h = q_nope . (W_UK c) + q_rope . r = [q_nope W_UK, q_rope] . [c, r]

so attention can read ``[c, r]`` as the one key of all heads, with c as its value: W_UK multiplies the query, W_UV the
result (``reference.head_linear``). The pass does so wherever K is ``cat(first part of a linear, expanded r)`` and V the
second part of the same linear: the graph is matched, no model's name. The softmax scale stays. The weight is read in
place: the checkpoint does not change. Exact.

Bytes of a token in a layer: ``(rank + R) * itemsize`` in place of ``H * (D + Dv) * itemsize``. The price is
arithmetic, 2 (rank + R) + 2 rank FLOPs for a query, a key and a head in place of 2 D + 2 Dv: prompts, which are bound
by arithmetic, get slower with their length, decode steps, which are bound by memory, faster
(docs/decisions/0038-latent-kv.md). The attention of a changed layer runs on the best kernel of the target, since the
plain kernel, PyTorch's, would expand the latents to all heads again. The weight stays in float also under a quantizer.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.ops.attention import ATTENTION
from optkit.graph.shapes import Point, infer_shapes
from optkit.graph.states import KVSpec
from optkit.kernels import reference, select
from optkit.passes.base import Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit.passes.rewriting.stack import site_name

aten = torch.ops.aten
PROBE = Point(tokens=4099, sequences=1, context=4099)  # no model has so many heads or channels in a head
NO_LATENT = "its keys and values are not two parts of one linear layer"


@dataclass(frozen=True)
class Latent:
    """The parts of an attention layer over latents.

    Attributes:
        linear: the linear layer from latents [T, rank] to ``nope + v`` channels of each head.
        shared: the part of the keys that all heads have, [T, 1, R] or [1, T, R].
        turned: True where ``shared`` is [1, T, R].
        heads, nope, v: the heads, and the channels of a head that the linear layer gives to its key and its value.
    """

    linear: fx.Node
    shared: fx.Node
    turned: bool
    heads: int
    nope: int
    v: int


class LatentKV(Pass):
    name = "latent_kv"
    stage = Stage.FUSE

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        plan = Plan()
        values = infer_shapes(graph, PROBE)
        for node in graph.calls(reference.attention):
            spec = spec_of(graph, node)
            found = latent_of(graph, node, values)
            reason = found if isinstance(found, str) else why_not(graph, node, found, spec, values, ctx)
            if isinstance(found, str) or reason:
                plan.skips.append(Skip(f"layer {spec.layer}", reason or ""))
            else:
                plan.sites.append(Site(site_name(graph, found.linear), (node,)))
        return plan

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        values, before = infer_shapes(graph, PROBE), graph.meta.kv_specs
        found = [(site.nodes[0], latent_of(graph, site.nodes[0], values)) for site in plan.sites]
        for node, latent in found:
            assert isinstance(latent, Latent)
            absorb(graph, node, latent, values)
        graph.prune()
        drop_unread_inputs(graph)
        stats = {
            "kv_bytes_per_token_before": sum(spec.token_bytes for spec in before),
            "kv_bytes_per_token_after": sum(spec.token_bytes for spec in graph.meta.kv_specs),
            "flops_per_pair_before": sum(pair_flops(spec) for spec in before),
            "flops_per_pair_after": sum(pair_flops(spec) for spec in graph.meta.kv_specs),
        }
        return PassResult(len(plan.sites), stats)


def pair_flops(spec: KVSpec) -> int:
    """FLOPs of attention for a query, a key and a head."""
    return 2 * (spec.head_dim + spec.v_head_dim)


def spec_of(graph: Graph, attention: fx.Node) -> KVSpec:
    """The spec of the pools of an attention node."""
    pool = str(ops.argument(attention, "k_cache").target)
    return next(spec for spec in graph.meta.kv_specs if spec.inputs[0] == pool)


# -- recognition -------------------------------------------------------------------------------------------


def latent_of(graph: Graph, attention: fx.Node, values: Mapping[fx.Node, Any]) -> Latent | str:
    """The latents behind the keys and values of ``attention``, or the reason against there being any."""
    key, value = (ops.argument(attention, name) for name in "kv")
    if not joins_channels(key, values) or len(key.args[0]) != 2:
        return NO_LATENT
    own, expanded = key.args[0]
    parts = part_of_heads(own, 0), part_of_heads(value, 1)
    if None in parts or parts[0] != parts[1]:
        return NO_LATENT
    split, linear, sizes = parts[0]  # type: ignore[misc]
    expansion, turned = unturned(expanded)
    if expansion.target is not aten.expand.default:
        return "no part of its keys is the same for all heads"
    shared, rest = expansion.args[0], values[expanded].shape[2]
    if list(values[shared].shape) != ([1, PROBE.tokens, rest] if turned else [PROBE.tokens, 1, rest]):
        return "no part of its keys is the same for all heads"
    if split.args[1] != [values[own].shape[2], values[value].shape[2]]:
        return NO_LATENT
    inside = {attention, key, *between(own, linear), *between(value, linear)}
    if any(user not in inside for node in inside - {attention} for user in node.users):
        return "something besides its attention reads its keys or values"
    return Latent(linear, shared, turned, sizes[1], *split.args[1])


def joins_channels(node: Any, values: Mapping[fx.Node, Any]) -> bool:
    """True for a concatenation of [T, H, ...] in the last dimension."""
    if not isinstance(node, fx.Node) or node.target is not aten.cat.default:
        return False
    return values[node].dim() == 3 and (*node.args[1:], 0)[0] in (-1, 2)


def unturned(node: fx.Node) -> tuple[fx.Node, bool]:
    """The value before transposes of the first two dimensions, and True where their number is odd."""
    turned = False
    while node.target is aten.transpose.int and set(node.args[1:]) == {0, 1}:
        node, turned = node.args[0], not turned
    return node, turned


def part_of_heads(node: fx.Node, index: int) -> tuple[fx.Node, fx.Node, list[int]] | None:
    """The split of the channels of heads with ``node`` as part ``index``, the linear layer with these channels as
    columns, and the sizes [-1, H, channels] in between; None for other values.
    """
    part, turned = unturned(node)
    if part.target is not operator.getitem or part.args[1] != index:
        return None
    split = part.args[0]
    if split.target is not aten.split_with_sizes.default or split.args[2:] not in ((-1,), (2,)):
        return None
    heads, turned_before = unturned(split.args[0])
    if turned != turned_before or heads.target is not aten.reshape.default or len(split.args[1]) != 2:
        return None
    linear, sizes = heads.args
    plain = len(sizes) == 3 and sizes[0] == -1 and all(type(size) is int for size in sizes)
    if not plain or linear.target is not reference.linear:
        return None
    return split, linear, sizes


def between(node: fx.Node, linear: fx.Node) -> list[fx.Node]:
    """The nodes from ``node`` back to ``linear``, along the first arguments."""
    found = []
    while node is not linear:
        found.append(node)
        node = node.args[0]
    return [*found, linear]


def why_not(
    graph: Graph, node: fx.Node, latent: Latent, spec: KVSpec, values: Mapping[fx.Node, Any], ctx: PassContext
) -> str | None:
    """The reason against attention over latents in a layer that has them, or None."""
    x, q = values[ops.activation(latent.linear)], values[ops.argument(node, "q")]
    if ops.bias(latent.linear) is not None:
        return "the linear layer of its keys and values has a bias"
    if graph.weight_of(ops.weight(latent.linear)) is None or x.dim() != 2:
        return "the linear layer of its keys and values is no matrix on rows of tokens"
    if q.shape[1] != latent.heads:
        return "several query heads share a key"
    after = latent_spec(spec, latent, x)
    if after.token_bytes >= spec.token_bytes:
        return f"a latent of {after.head_dim} channels is no smaller than its keys and values"
    pools = {ops.argument(other, "k_cache") for other in graph.calls(*ATTENTION) if other is not node}
    if ops.argument(node, "k_cache") in pools:
        return "another layer reads its keys and values"
    options = {**graph.site_options(node), "latent": True}
    if ctx.target.kind != "cpu" and select("attention", ctx.target, options=options) is None:
        return f"no attention kernel reads latent KV on {ctx.target.name}"
    return None


# -- rewriting ---------------------------------------------------------------------------------------------


def latent_spec(spec: KVSpec, latent: Latent, x: Tensor) -> KVSpec:
    """The spec of the pool of latents ``x`` [T, rank], which takes the place of ``spec``."""
    rank, rest = x.shape[1], spec.head_dim - latent.nope
    return replace(spec, num_kv_heads=1, head_dim=rank + rest, v_head_dim=rank, latent=True)


def absorb(graph: Graph, node: fx.Node, latent: Latent, values: Mapping[fx.Node, Any]) -> None:
    """Put attention over latents in the place of ``node``."""
    spec, x = spec_of(graph, node), ops.activation(latent.linear)
    after = latent_spec(spec, latent, values[x])
    rank, rest = after.v_head_dim, spec.head_dim - latent.nope
    weight = graph.weight_node(str(ops.weight(latent.linear).target), node)
    whole = {"num_heads": latent.heads}
    with graph.fx.inserting_before(node):

        def call(target: Any, *args: Any, **options: int) -> fx.Node:
            return graph.fx.call_function(target, args, options)

        value = call(aten.reshape.default, x, [-1, 1, rank])
        shared = call(aten.transpose.int, latent.shared, 0, 1) if latent.turned else latent.shared
        key = call(aten.cat.default, [value, shared], -1)
        own, rotated = query_parts(graph, ops.argument(node, "q"), latent.nope, rest, values)
        own = call(reference.head_linear, own, weight, **whole, first=0, last=latent.nope, transposed=1)
        query = call(aten.cat.default, [own, rotated], -1)
        k_cache, rest_of_call = ops.argument(node, "k_cache"), node.args[5:]
        attended = graph.fx.call_function(
            reference.attention, (query, key, value, k_cache, None, *rest_of_call), dict(node.kwargs)
        )
        last = latent.nope + latent.v
        result = call(reference.head_linear, attended, weight, **whole, first=latent.nope, last=last)
    node.replace_all_uses_with(result)
    graph.fx.erase_node(node)
    specs = graph.meta.kv_specs
    graph.meta = graph.meta.with_kv_specs(after if each is spec else each for each in specs)


def query_parts(
    graph: Graph, query: fx.Node, nope: int, rest: int, values: Mapping[fx.Node, Any]
) -> tuple[fx.Node, fx.Node]:
    """The first ``nope`` and the last ``rest`` channels of ``query`` [T, H, nope + rest]."""
    if joins_channels(query, values) and [values[part].shape[2] for part in query.args[0]] == [nope, rest]:
        return query.args[0]
    split = graph.fx.call_function(aten.split_with_sizes.default, (query, [nope, rest], -1))
    first, second = (graph.fx.call_function(operator.getitem, (split, i)) for i in range(2))
    return first, second


def drop_unread_inputs(graph: Graph) -> None:
    """Remove the placeholders of pools that are no more."""
    for node in graph.fx.find_nodes(op="placeholder"):
        if not node.users and str(node.target) not in graph.meta.inputs:
            graph.fx.erase_node(node)
