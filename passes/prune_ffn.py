"""prune_ffn: removes the least important feed-forward channels, the same number in every layer.

A channel j of a gated feed-forward part contributes ``a_j * w_j``, an activation times a column of the down projection.
The importance is the mean of ``|a_j|`` over calibration text times ``|w_j|``; the channels with the least importance
are removed: rows of gate and up, a column of down. (Activation-weighted magnitudes as in Wanda, arXiv 2306.11695, for
whole channels.) The result is a smaller dense model: faster by every kernel, on every machine. The pass is held to the
same bounds as a quantizer.

With ``refit`` the down projection of the channels that are left takes over what it can of the others
(``passes/rewriting/refit.py``): a closed form, from the same text.

``intermediate_size`` is a single number in config.json, so all layers keep equally many channels, a multiple of
``multiple`` so that groups of later quantizers still fit. Where a layer can't be pruned, no layer is.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, fx

from optkit.calibration.samples import Calibration
from optkit.calibration.walk import Walk
from optkit.graph import ops
from optkit.graph.ir import Graph, Origin, Part
from optkit.kernels import reference
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit.passes.quantization.calibrated import Moments, SharedInput, walk_through
from optkit.passes.quantization.resume import FinishedGroups
from optkit.passes.rewriting.refit import refitted
from optkit.passes.rewriting.stack import site_name

GATED, PACKED = tuple(ops.GATED), tuple(ops.GATED.values())


class PruneFFNConfig(Config):
    ffn: float = Field(0.1, gt=0, lt=1, description="share of each layer's feed-forward channels to remove")
    multiple: int = Field(64, ge=1, le=4096, description="channels that are left are a multiple of this")
    refit: bool = Field(
        False, description="let the channels that are left take over what they can of the others"
    )
    damping: float = Field(
        0.1,
        gt=0,
        le=1e3,
        description="refit: penalty on changed weights, of the mean square of an activation",
    )
    calibration: Calibration = Field(
        default_factory=lambda: Calibration(samples=16), description="the text that importance is measured on"
    )


class PruneFFN(Pass):
    name = "prune_ffn"
    stage = Stage.TRANSFORM
    exact = False
    Config = PruneFFNConfig

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        """Find the feed-forward parts; the nodes of a site are (down, activation, producing linears)."""
        plan = Plan()
        for down in graph.linears():
            x = ops.activation(down)
            if isinstance(x, fx.Node) and x.target in (*GATED, *PACKED):
                reason = why_not(graph, down, x)
                name = site_name(graph, down)
                if reason:
                    plan.skips.append(Skip(name, reason))
                else:
                    plan.sites.append(Site(name, (down, x, *makers(x))))
        for node in graph.calls(reference.expert_linear):
            plan.skips.append(Skip(f"experts {node.name}", "mixture-of-experts weights are not pruned"))
        self.all_or_none(graph, plan)
        if not (plan.sites or plan.skips):
            plan.skips.append(Skip("feed-forward parts", "no layer multiplies a gate and up (SwiGLU, GeGLU)"))
        return plan

    def all_or_none(self, graph: Graph, plan: Plan) -> None:
        """Move all sites to the skips where the layers can't keep equally many channels."""
        widths = {width(graph, site) for site in plan.sites}
        reason = None
        if plan.skips:
            reason = (
                f"intermediate_size is one number for all layers, and {plan.skips[0].site} can't be pruned"
            )
        elif len(widths) > 1:
            reason = f"the layers have {sorted(widths)} channels, and intermediate_size is one number"
        elif widths and self.kept(min(widths)) < 1:
            reason = f"nothing would be left of {min(widths)} channels in multiples of {self.config.multiple}"
        elif widths and self.kept(min(widths)) == min(widths):
            share, multiple = self.config.ffn, self.config.multiple
            reason = f"{min(widths)} channels less {share:.0%} are as many in multiples of {multiple}"
        if reason:
            plan.skips += [Skip(site.name, reason) for site in plan.sites]
            plan.sites.clear()

    def kept(self, channels: int) -> int:
        """The number of ``channels`` to keep: the multiple nearest to the wanted share."""
        wanted = channels * (1 - self.config.ffn) / self.config.multiple
        return min(channels, round(wanted) * self.config.multiple)

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        before = graph.num_bytes()
        channels = width(graph, plan.sites[0])
        kept = self.kept(channels)
        for site, solution in zip(plan.sites, self.solutions(graph, plan, kept, ctx), strict=True):
            (down, _, *linears), index = site.nodes, solution["channels"]
            if "weight" in solution:
                graph.set_weight(ops.weight(down), solution["weight"])
            else:
                select_columns(graph, down, index)
            for linear in linears:
                select_rows(graph, linear, index, channels)
        graph.annotations["config"] = {**graph.annotations.get("config", {}), "intermediate_size": kept}
        stats = {"intermediate_size_before": channels, "intermediate_size_after": kept}
        bytes_ = {"weight_bytes_before": before, "weight_bytes_after": graph.num_bytes()}
        return PassResult(len(plan.sites), stats | bytes_)

    def solutions(self, graph: Graph, plan: Plan, kept: int, ctx: PassContext) -> list[dict[str, Tensor]]:
        """``channels`` [kept] to keep of each site, and with ``refit`` the ``weight`` of the down projection."""
        if graph.is_meta:  # a dry run, without values
            return [{"channels": torch.arange(kept)} for _ in plan.sites]
        windows, found = ctx.calibration_windows(self.config.calibration), list[dict[str, Tensor]]()

        def solve(group: SharedInput, walk: Walk) -> dict[str, Tensor]:
            weight = graph.linear_weight(group.sites[0].nodes[0])
            if not self.config.refit:
                return {"channels": largest(importance(list(walk.values(group.x)), weight), kept)}
            moments = Moments(walk.values(group.x))
            index = largest(moments.mean * weight.norm(dim=0), kept)
            return {
                "channels": index,
                "weight": refitted(weight, moments.hessian, index, self.config.damping),
            }

        walk_through(
            Walk(graph, windows, ctx.target),
            [SharedInput((site,)) for site in plan.sites],
            solve,
            lambda group, solution, walk: found.append(dict(solution)),
            FinishedGroups(ctx.workspace, "refit" if self.config.refit else "channels"),
            lambda text, part=None: ctx.progress(f"{self.name}: {text}", part=part),
        )
        return found


def largest(score: Tensor, count: int) -> Tensor:
    """The places [count] of the largest values of ``score``, in order."""
    return score.topk(count).indices.sort().values


def importance(activations: list[Tensor], down: Tensor) -> Tensor:
    """``mean|a_j| * |w_j|`` [F] of activations [T, F], a tensor for each window, and the down projection [N, F]."""
    total = sum(x.abs().sum(dim=0) for x in activations)
    return total / sum(map(len, activations)) * down.norm(dim=0)


def makers(x: fx.Node) -> tuple[Any, ...]:
    """The inputs of a gated activation: gate and up, or both stacked."""
    names = ("gate", "up") if x.target in GATED else ("gate_up",)
    return tuple(ops.argument(x, name) for name in names)


def width(graph: Graph, site: Site) -> int:
    """The channels of a feed-forward part."""
    return graph.linear_shape(site.nodes[0])[1]


def why_not(graph: Graph, down: fx.Node, x: fx.Node) -> str | None:
    if len(x.users) > 1:
        return "something else reads its activations"
    for linear in makers(x):
        if not (isinstance(linear, fx.Node) and linear.target is reference.linear and len(linear.users) == 1):
            return "gate and up are not plain linear layers of its own"
    for linear in (down, *makers(x)):
        weight = graph.weight_of(ops.weight(linear))
        if (
            weight is None
            or weight.origin is None
            or weight.dtype != torch.float32
            or len(ops.weight(linear).users) > 1
        ):
            return "a weight is not a float32 checkpoint tensor of its own"
    return None


def select_columns(graph: Graph, linear: fx.Node, index: Tensor) -> None:
    name = str(ops.weight(linear).target)
    weight = graph.weights[name]
    value = weight.value
    graph.weights[name] = graph.new_weight(value[:, index.to(value.device)].contiguous(), weight.origin)


def select_rows(graph: Graph, linear: fx.Node, index: Tensor, channels: int) -> None:
    """Rows ``index`` of each run of ``channels`` rows (gate and up may be stacked), of the weight and the bias."""
    for argument in (ops.weight(linear), ops.bias(linear)):
        weight = graph.weight_of(argument)
        if weight is None or weight.origin is None:
            continue
        rows = torch.cat([index + start for start in range(0, weight.shape[0], channels)])
        parts = tuple(Part(p.name, p.rows * len(index) // channels) for p in weight.origin.parts)
        value = weight.value
        value = value[rows.to(value.device)].contiguous()
        graph.weights[str(argument.target)] = graph.new_weight(value, Origin(parts, weight.origin.transposed))
