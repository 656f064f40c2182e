"""smoothquant: moves activation outliers into the weights, where int8 can hold them.

A few channels of a transformer's activations are tens of times larger than the rest, and one of them sets the
int8 scale of a whole token. Dividing channel j of the activation by ``s_j`` and multiplying column j of the weight by
``s_j`` changes nothing in exact arithmetic and evens both out; ``s_j = max|x_j|^alpha / max|w_j|^(1 - alpha)``
(SmoothQuant, arXiv 2211.10438). The division costs nothing at run time: it is folded into what produces the
activation, the RMSNorm weight before the attention and MLP projections, and the up projection before the down
projection. Needs calibration text for ``max|x_j|``.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, fx

from optkit.graph.ir import Graph, Weight
from optkit.graph.taps import channel_absmax
from optkit.kernels import reference
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit.passes.rewrite import site_name

NORMS = (reference.rms_norm, reference.add_rms_norm)
PACKED = (reference.silu_mul_packed, reference.gelu_mul_packed)
GATED = (reference.silu_mul, reference.gelu_mul)


class SmoothQuantConfig(Config):
    alpha: float = Field(0.5, ge=0.0, le=1.0, description="how much of the range moves into the weights")
    tokens: int = Field(4096, ge=512, le=1 << 20, description="calibration tokens")


class SmoothQuant(Pass):
    name = "smoothquant"
    stage = Stage.SMOOTH
    exact = True
    Config = SmoothQuantConfig

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        """A site is an activation and all linears that read it: (producer, linears...)."""
        plan = Plan()
        for x, linears in readers(graph).items():
            name = site_name(graph, linears[0])
            reason = why_not(graph, x, linears)
            if reason:
                plan.skips.append(Skip(name, reason))
            else:
                plan.sites.append(Site(name, (x, *linears)))
        return plan

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        inputs = [site.nodes[0] for site in plan.sites]
        ranges = channel_absmax(graph, inputs, ctx.calibration_windows(self.config.tokens), ctx.target)
        for site in plan.sites:
            x, *linears = site.nodes
            scale = smoothing_scale(ranges[x.name], [weight_of(graph, n) for n in linears], self.config.alpha)
            divide_producer(graph, x, scale)
            for linear in linears:
                change(graph, linear.args[1], weight_of(graph, linear) * scale)
        return PassResult(len(plan.sites), {"calibration_tokens": self.config.tokens})


def smoothing_scale(x_absmax: Tensor, weights: list[Tensor], alpha: float) -> Tensor:
    """``s`` [K], normalized to geometric mean 1: x_absmax [K], weights [N, K] that read the same activation."""
    w_absmax = torch.stack([w.abs().amax(dim=0) for w in weights]).amax(dim=0)
    scale = x_absmax.clamp_min(1e-5) ** alpha / w_absmax.clamp_min(1e-5) ** (1 - alpha)
    return scale / scale.log().mean().exp()


# -- finding sites ---------------------------------------------------------------------------------------


def readers(graph: Graph) -> dict[fx.Node, list[fx.Node]]:
    """Linears by the activation they read."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.calls(reference.linear):
        found.setdefault(node.args[0], []).append(node)
    return found


def why_not(graph: Graph, x: fx.Node, linears: list[fx.Node]) -> str | None:
    if any(graph.weight_of(n.args[1]) is None for n in linears):
        return "its weight is computed"
    if any(str(n.args[1].target) == graph.meta.input_embedding for n in linears):
        return "its weight is tied to the embedding"
    if any(user.target is not reference.linear for user in x.users):
        return "something besides linear layers reads its input"
    if producer_weight(graph, x) is None:
        return "no norm weight or up projection to fold the scale into"
    return None


def producer_weight(graph: Graph, x: fx.Node) -> fx.Node | None:
    """The weight node that scales x channel by channel: a norm's, or the up projection's rows."""
    if is_norm_output(x):
        weight = norm_of(x).args[norm_weight_position(x)]
        return weight if private(graph, weight) else None
    if x.target in PACKED + GATED:
        up = x.args[0] if x.target in PACKED else x.args[1]
        alone = isinstance(up, fx.Node) and up.target is reference.linear and len(up.users) == 1
        return up.args[1] if alone and private(graph, up.args[1]) else None
    return None


def private(graph: Graph, node: Any) -> bool:
    """True for a weight that exactly one op reads, so that changing it changes nothing else."""
    if graph.weight_of(node) is None:
        return False
    same = [n for n in graph.fx.nodes if n.op == "get_attr" and n.target == node.target]
    return sum(len(n.users) for n in same) == 1


def is_norm_output(x: fx.Node) -> bool:
    return norm_of(x) is not None


def norm_of(x: fx.Node) -> Any:
    if x.target is reference.rms_norm:
        return x
    fused = x.target is operator.getitem and x.args[1] == 0 and x.args[0].target is reference.add_rms_norm
    return x.args[0] if fused else None


def norm_weight_position(x: fx.Node) -> int:
    return 1 if norm_of(x).target is reference.rms_norm else 2


# -- changing weights ------------------------------------------------------------------------------------


def weight_of(graph: Graph, linear: fx.Node) -> Tensor:
    return graph.weights[str(linear.args[1].target)].value


def change(graph: Graph, node: fx.Node, value: Tensor) -> None:
    """Give a weight a new value; tensors may be shared with other graphs, so never in place."""
    name = str(node.target)
    graph.weights[name] = Weight(value, graph.weights[name].origin)


def divide_producer(graph: Graph, x: fx.Node, scale: Tensor) -> None:
    """Fold ``1 / scale`` into what makes x."""
    weight = producer_weight(graph, x)
    if weight is None:
        raise ValueError(f"{x.name} has no producer to fold into")
    value = graph.weights[str(weight.target)].value
    if is_norm_output(x):
        offset = norm_offset(x)
        change(graph, weight, (value + offset) / scale - offset)
        return
    if x.target in PACKED:
        scale = torch.cat((torch.ones_like(scale), scale))
    change(graph, weight, value / scale[:, None])
    bias = up_bias(x)
    if bias is not None:
        change(graph, bias, graph.weights[str(bias.target)].value / scale)


def norm_offset(x: fx.Node) -> float:
    norm = norm_of(x)
    position = norm_weight_position(x) + 2
    return float(norm.args[position] if len(norm.args) > position else norm.kwargs.get("offset", 0.0))


def up_bias(x: fx.Node) -> Any:
    up = x.args[0] if x.target in PACKED else x.args[1]
    return up.args[2] if len(up.args) > 2 else None
