"""smoothquant: moves activation outliers into the weights, where int8 can hold the outliers.

A few channels of a transformer's activations are tens of times larger than the rest, and a single outlier sets the int8
scale of a whole token. Dividing channel j of the activation by ``s_j`` and multiplying column j of the weight by
``s_j`` changes nothing in exact arithmetic and evens out activation and weight; ``s_j = max|x_j|^alpha / max|w_j|^(1 -
alpha)`` (SmoothQuant, arXiv 2211.10438). The division costs nothing at run time: the producer of the activation absorbs
the factor, the RMSNorm weight before the attention and MLP projections, and the up projection before the down
projection. ``max|x_j|`` comes from calibration text. With ``alpha: search`` the exponent is found for each activation
(``smoothing``). The input of the modules in ``ignore`` stays as it is, for example of int4 layers: smoothing moves
their weights off the grid of a checkpoint that was int4 before. With ``activations: auto``, as in the int8 pass that
follows, a CPU with AMX smooths nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from optkit.calibration.samples import Calibration
from optkit.calibration.walk import Walk
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit.passes.quantization.activation_types import Activations, in_bfloat16
from optkit.passes.quantization.calibrated import SharedInput, collect
from optkit.passes.quantization.smoothing import search_smoothing, smoothing_scale
from optkit.passes.quantization.targets import Patterns, listed
from optkit.passes.rewriting.folding import fold, readers, why_not_foldable
from optkit.passes.rewriting.stack import site_name

SAMPLED = 1024  # tokens that a search looks at


class SmoothQuantConfig(Config):
    alpha: float | Literal["search"] = Field(
        0.5,
        description="how much of the range moves into the weights, 0 to 1; 'search' tries, for each activation",
    )
    group_size: Literal[0, 32, 64, 96, 128, 192] = Field(
        0, description="for the search: channels to a scale of the int8 that follows, where it divides"
    )
    activations: Activations = Field(
        "int8", description="of the int8 pass that follows; with bfloat16 there is nothing to smooth"
    )
    ignore: Patterns = Field(
        default_factory=list,
        description="modules whose input is not smoothed: exact names, suffixes, or 're:' patterns",
    )
    calibration: Calibration = Field(Calibration(samples=8), description="the text to calibrate on")

    @field_validator("alpha")
    @classmethod
    def a_share(cls, alpha: float | str) -> float | str:
        if not isinstance(alpha, str) and not 0 <= alpha <= 1:
            raise ValueError("alpha is 0 to 1, or 'search'")
        return alpha


class SmoothQuant(Pass):
    name = "smoothquant"
    stage = Stage.TRANSFORM
    exact = True
    Config = SmoothQuantConfig

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        """Find activations with foldable producers; the nodes of a site are (activation, linears...)."""
        plan = Plan()
        for x, linears in readers(graph).items():
            name = site_name(graph, linears[0])
            reason = why_not_foldable(graph, x, linears)
            if any(listed(self.config.ignore, graph, node, site_name(graph, node)) for node in linears):
                reason = "on the ignore list"
            of_experts = any(node.target is reference.expert_linear for node in linears)
            if in_bfloat16(self.config.activations, ctx.target) and not of_experts:
                reason = "activations in bfloat16 are not quantized"
            if reason:
                plan.skips.append(Skip(name, reason))
            else:
                plan.sites.append(Site(name, (x, *linears)))
        return plan

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        if graph.is_meta:  # of a dry run: no shape changes
            return PassResult(len(plan.sites))
        windows = ctx.calibration_windows(self.config.calibration)

        def solve(group: SharedInput, walk: Walk) -> Tensor:
            weights = [graph.linear_weight(node) for site in group.sites for node in site.nodes]
            return self.scale(walk.values(group.x), weights, len(windows))

        groups = [SharedInput((Site(site.name, site.nodes[1:]),)) for site in plan.sites]
        scales = collect(graph, groups, windows, solve, "scales", ctx, self.name)
        for site, scale in zip(plan.sites, scales, strict=True):
            x, *linears = site.nodes
            fold(graph, x, linears, scale)
        return PassResult(len(plan.sites), {"calibration_tokens": sum(map(len, windows))})

    def scale(self, values: Iterable[Tensor], weights: Sequence[Tensor], windows: int) -> Tensor:
        """``s`` [K] of an activation with ``values`` [T, K], window by window, and readers ``weights`` [N, K]."""
        if self.config.alpha == "search":
            few = -(-SAMPLED // windows)  # of each window, evenly
            sample = torch.cat([x[:: -(-len(x) // few)] for x in values])
            group = self.config.group_size
            return search_smoothing(sample, weights, 0 if group and sample.shape[1] % group else group)
        x_absmax = torch.stack([x.abs().amax(dim=0) for x in values]).amax(dim=0)
        return smoothing_scale(x_absmax, weights, self.config.alpha)
