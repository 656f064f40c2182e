"""smoothquant: moves activation outliers into the weights, where int8 can hold them.

A few channels of a transformer's activations are tens of times larger than the rest, and one of them sets the
int8 scale of a whole token. Dividing channel j of the activation by ``s_j`` and multiplying column j of the weight by
``s_j`` changes nothing in exact arithmetic and evens both out; ``s_j = max|x_j|^alpha / max|w_j|^(1 - alpha)``
(SmoothQuant, arXiv 2211.10438). The division costs nothing at run time: it is folded into what produces the
activation, the RMSNorm weight before the attention and MLP projections, and the up projection before the down
projection. Needs calibration text for ``max|x_j|``.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from optkit.calibration import Calibration
from optkit.graph.ir import Graph
from optkit.graph.walk import Walk
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit.passes.calibrated import Group, walk_through
from optkit.passes.finished_groups import FinishedGroups
from optkit.passes.folding import fold, readers, why_not_foldable
from optkit.passes.linear_quantization import weight_of
from optkit.passes.rewrite import site_name


class SmoothQuantConfig(Config):
    alpha: float = Field(0.5, ge=0.0, le=1.0, description="how much of the range moves into the weights")
    calibration: Calibration = Field(Calibration(samples=8), description="the text to calibrate on")


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
            reason = why_not_foldable(graph, x, linears)
            if reason:
                plan.skips.append(Skip(name, reason))
            else:
                plan.sites.append(Site(name, (x, *linears)))
        return plan

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        windows = ctx.calibration_windows(self.config.calibration)
        ranges: list[Tensor] = []

        def largest(group: Group, walk: Walk) -> dict[str, Tensor]:
            return {"range": torch.stack([x.abs().amax(dim=0) for x in walk.values(group.x)]).amax(dim=0)}

        walk_through(
            Walk(graph, windows, ctx.target),
            [Group((Site(site.name, site.nodes[1:]),)) for site in plan.sites],
            largest,
            lambda group, solution, walk: ranges.append(solution["range"]),
            FinishedGroups(ctx.workspace, "ranges"),
            lambda text, part=None: ctx.tell(f"{self.name}: {text}", part=part),
        )
        for site, x_absmax in zip(plan.sites, ranges, strict=True):
            x, *linears = site.nodes
            scale = smoothing_scale(x_absmax, [weight_of(graph, n) for n in linears], self.config.alpha)
            fold(graph, x, linears, scale)
        return PassResult(len(plan.sites), {"calibration_tokens": sum(map(len, windows))})


def smoothing_scale(x_absmax: Tensor, weights: list[Tensor], alpha: float) -> Tensor:
    """``s`` [K], normalized to geometric mean 1: x_absmax [K], weights [N, K] that read the same activation."""
    w_absmax = torch.stack([w.abs().amax(dim=0) for w in weights]).amax(dim=0)
    scale = x_absmax.clamp_min(1e-5) ** alpha / w_absmax.clamp_min(1e-5) ** (1 - alpha)
    return scale / scale.log().mean().exp()
