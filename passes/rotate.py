"""rotate: rotates the residual stream and the values of attention heads, to spread outliers before int8 and int4.

A few channels of a transformer's activations are tens of times larger than the rest. A rotation by an orthogonal matrix
Q spreads these channels over all channels. Offline rotations (R1 and R2 of SpinQuant, arXiv 2405.16406; QuaRot, arXiv
2404.00456) change weights alone:

* The residual stream (R1). Writers are multiplied by Q on the output side, readers on the input side. An RMSNorm
  without a weight commutes with Q, so each norm's weight is folded into the readers first. A tied head gets a weight of
  the head's own.
* The values of each head (R2, option ``heads``): rows of the value projection, columns of the output projection.

The result is the same model in exact arithmetic, with the same ops. On disk the result is a plain model for
``transformers``; only an untied head costs memory. ``rewriting/hadamard.py`` makes the matrices. The input of the down
projection stays unchanged, because a product of two channels does not commute with a rotation; ``smoothquant`` evens
out the input of the down projection. A checkpoint of 4-bit weights leaves the 4-bit grid: ``w4a8`` then rounds anew.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, fx

from optkit.graph import ops
from optkit.graph.ir import Graph, Origin, Part, Weight
from optkit.kernels import reference
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit.passes.rewriting.folding import norm_of
from optkit.passes.rewriting.hadamard import Rotation, rotation
from optkit.passes.rewriting.heads import Heads, heads_at, heads_of
from optkit.passes.rewriting.residual import ResidualStream, residual_stream
from optkit.passes.rewriting.stack import site_name

STREAM = "residual stream"


class RotateConfig(Config):
    heads: bool = Field(True, description="rotate the values of each attention head too")
    seed: int = Field(0, ge=0, lt=1 << 63, description="of the random signs")


class Rotate(Pass):
    name = "rotate"
    stage = Stage.TRANSFORM
    exact = True
    Config = RotateConfig

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        """Find the residual stream, and attention layers; the node of a layer's site is the output projection."""
        plan = Plan()
        stream = residual_stream(graph)
        reason = stream if isinstance(stream, str) else why_not_stream(graph, stream)
        if isinstance(stream, str) or reason:
            plan.skips.append(Skip(STREAM, reason or ""))
        else:
            plan.sites.append(Site(STREAM, (stream.writers[0],)))
        for attention in graph.calls(reference.attention) if self.config.heads else ():
            found = heads_of(graph, attention)
            if isinstance(found, str):
                plan.skips.append(Skip(f"attention {attention.name}", found))
            elif ops.argument(attention, "v") is not found.reshapes[2]:
                plan.skips.append(Skip(f"attention {attention.name}", "an op changes the values of a head"))
            else:
                plan.sites.append(Site(site_name(graph, found.out), (found.out,)))
        return plan

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        stats = {}
        for site in plan.sites:
            if site.name == STREAM:
                q = rotate_stream(graph, self.config.seed)
                stats = {"order": len(q.signs), "hadamard": q.hadamard}
            else:
                rotate_values(graph, heads_at(graph, site), self.config.seed)
        return PassResult(len(plan.sites), stats)


# -- the residual stream -----------------------------------------------------------------------------------


def why_not_stream(graph: Graph, stream: ResidualStream) -> str | None:
    """The reason against rotating a residual stream, or None."""
    if any(norm.target is reference.layer_norm for norm in stream.norms):
        return "its norms subtract the mean (LayerNorm), which does not commute with a rotation"
    embedding = graph.meta.input_embedding
    calls = [*stream.norms, *stream.writers, *stream.readers]
    for call in calls:
        for operand in (ops.weight(call), ops.bias(call)):
            weight = graph.weight_of(operand)
            if operand is None or str(operand.target) == embedding:
                continue
            if weight is None or weight.origin is None or weight.dtype != torch.float32:
                return f"a weight of {call.name} is not a float32 checkpoint tensor"
            if len(users(graph, operand)) > 1:
                return f"something else uses a weight of {call.name}"
    if any(user not in calls for user in users(graph, ops.weight(stream.writers[0]))):
        return "something besides the output head uses the token embedding"
    return None


def users(graph: Graph, weight: fx.Node) -> list[fx.Node]:
    """The calls that read the tensor of the ``get_attr`` node ``weight``."""
    same = (node for node in graph.fx.nodes if node.op == "get_attr" and node.target == weight.target)
    return [user for node in same for user in node.users]


def rotate_stream(graph: Graph, seed: int) -> Rotation:
    """Rotate the residual stream of ``graph`` and return the rotation; a dry run only unties the head."""
    stream = residual_stream(graph)
    assert isinstance(stream, ResidualStream)
    q = rotation(graph.weights[graph.meta.input_embedding].shape[1], seed)
    for reader in stream.readers:
        if str(ops.weight(reader).target) == graph.meta.input_embedding:
            untie(graph, reader)
    if graph.is_meta:
        return q
    for reader in stream.readers:
        weight = graph.linear_weight(reader)
        graph.set_weight(ops.weight(reader), q(weight * norm_factor(graph, norm_before(reader))))
    for norm in stream.norms:
        neutralize(graph, norm)
    for writer in stream.writers:
        turn_output(graph, writer, q)
    return q


def untie(graph: Graph, head: fx.Node) -> None:
    """Give a tied head a weight of the head's own, with the tensor of the embedding."""
    name = f"{graph.meta.output_embedding}.weight"
    stored = graph.weights[str(ops.weight(head).target)].stored
    graph.weights[name] = Weight(stored, Origin((Part(name, stored.shape[0]),)))
    head.args = (head.args[0], graph.weight_node(name, head), *head.args[2:])


def norm_before(reader: fx.Node) -> fx.Node:
    """The norm with the input of a linear as its result."""
    x = ops.activation(reader)
    while x.target is reference.select_rows:
        x = ops.activation(x)
    return norm_of(x)


def norm_factor(graph: Graph, norm: fx.Node) -> Tensor | float:
    """The factor [K] of each channel after a norm; 1 for a norm without a weight."""
    weight = ops.weight(norm)
    return 1.0 if weight is None else graph.weight_value(weight) + ops.argument(norm, "offset")


def neutralize(graph: Graph, norm: fx.Node) -> None:
    """Give a norm the weight with a factor of 1 for every channel."""
    weight = ops.weight(norm)
    if weight is not None:
        one = 1.0 - ops.argument(norm, "offset")
        graph.set_weight(weight, torch.full_like(graph.weight_value(weight), one))


def turn_output(graph: Graph, writer: fx.Node, q: Rotation) -> None:
    """Rotate the result of an embedding or a linear."""
    weight, bias = ops.weight(writer), ops.bias(writer)
    value = graph.weight_value(weight)
    turned = q(value) if writer.target is reference.embedding else q(value.T).T.contiguous()
    graph.set_weight(weight, turned)
    if bias is not None:
        graph.set_weight(bias, q(graph.weight_value(bias)))


# -- values of heads ---------------------------------------------------------------------------------------


def rotate_values(graph: Graph, layer: Heads, seed: int) -> None:
    """Rotate the values of each head of a layer: rows of the value projection, columns of the output projection."""
    if graph.is_meta:
        return
    heads, groups, size, width = layer.shape
    q = rotation(width, seed)
    first = (heads + groups) * size if len(layer.projections) == 1 else 0
    projection = layer.projections[-1]
    for operand in (ops.weight(projection), ops.bias(projection)):
        if operand is not None:
            value = graph.weight_value(operand).movedim(0, -1).clone()  # [K, N], or [N] of a bias
            value[..., first:] = q(value[..., first:].unflatten(-1, (groups, width))).flatten(-2)
            graph.set_weight(operand, value.movedim(-1, 0).contiguous())
    columns = graph.linear_weight(layer.out).unflatten(1, (heads, width))
    graph.set_weight(ops.weight(layer.out), q(columns).flatten(1))
