"""prune_2_4: of each four weights in a row of a linear layer two become zero; sparse tensor cores skip zeros.

NVIDIA GPUs from Ampere on multiply such a weight with half of the work, and read 9/16 of its bytes; the kernel is the
vendor's (``kernels/ops/triton/two_four.py``) and is chosen by the weights themselves, also for a checkpoint that
came 2:4 sparse. Elsewhere the zeros are multiplied like other weights: the same results, and no gain. Half of all
weights is a hard cut, so the pass is held to the same bounds as a quantizer. A float layer gains; a later quantizer
keeps the zeros and has no sparse kernel.

On disk weights are dense, with their zeros, and config.json has compressed-tensors' ``sparsity_config``: the layout
``sparse-24-bitmask``, which compressed-tensors had until 0.14, is refused by later versions and by transformers
(docs/decisions/0071-two-four-sparsity.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, fx

from optkit.calibration.samples import Calibration
from optkit.calibration.walk import Walk
from optkit.graph import ops
from optkit.graph.ir import TWO_FOUR, Graph
from optkit.kernels.two_four import GROUP
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit.passes.quantization.calibrated import Moments, SharedInput, by_activation, walk_through
from optkit.passes.quantization.resume import FinishedGroups
from optkit.passes.quantization.targets import LINEAR, Patterns, check_targets, listed
from optkit.passes.rewriting.stack import site_name
from optkit.passes.rewriting.two_four import magnitude, sparsegpt, wanda

Method = Literal["sparsegpt", "wanda", "magnitude"]


class Prune24Config(Config):
    method: Method = Field(
        "sparsegpt", description="how the weights to keep are chosen; magnitude reads no text"
    )
    damping: float = Field(
        0.01, gt=0, le=1, description="sparsegpt: of the mean of H's diagonal, added to it"
    )
    targets: Patterns = Field([LINEAR], description="layers to prune, by name, suffix or re: pattern")
    ignore: Patterns = Field([], description="layers to leave dense")
    calibration: Calibration = Field(
        default_factory=lambda: Calibration(samples=32), description="the text that layers are pruned on"
    )


class Prune24(Pass):
    name = "prune_2_4"
    stage = Stage.TRANSFORM
    exact = False
    Config = Prune24Config

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        """Find the float linear layers; the output head stays dense unless ``targets`` names it."""
        plan = Plan()
        linears = {node: site_name(graph, node) for node in graph.linears()}
        check_targets(self.config.targets, graph, linears)
        check_targets(self.config.ignore, graph, linears, "ignore")
        for node, name in linears.items():
            reason = self.why_not(graph, node, name)
            if reason:
                plan.skips.append(Skip(name, reason))
            else:
                plan.sites.append(Site(name, (node,)))
        return plan

    def why_not(self, graph: Graph, node: fx.Node, name: str) -> str | None:
        """The reason against pruning the layer, or None."""
        weight = graph.weight_of(ops.weight(node))
        if weight is None or weight.origin is None or weight.dtype != torch.float32:
            return "its weight is not a float32 checkpoint tensor"
        if str(ops.weight(node).target) == graph.meta.input_embedding:
            return "its weight is tied to the embedding"
        by_name = [target for target in self.config.targets if target != LINEAR]
        if not listed(by_name, graph, node, name):
            if LINEAR not in self.config.targets:
                return "not in targets"
            if name == graph.meta.output_embedding:
                return "the output head stays dense; name it in targets to prune it"
        if listed(self.config.ignore, graph, node, name):
            return "in ignore"
        if len(ops.weight(node).users) > 1:
            return "several ops read its weight"
        if weight.shape[1] % GROUP:
            return f"{weight.shape[1]} input channels are no multiple of {GROUP}"
        return None

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        names = [site.nodes[0].name for site in plan.sites]
        error = 0.0 if graph.is_meta else self.prune(graph, plan, ctx)
        graph.annotations[TWO_FOUR] = [*graph.annotations.get(TWO_FOUR, ()), *names]
        numbers = sum(graph.weights[str(ops.weight(s.nodes[0]).target)].shape.numel() for s in plan.sites)
        return PassResult(len(plan.sites), {"pruned_weights": numbers // 2, "relative_error": error})

    def prune(self, graph: Graph, plan: Plan, ctx: PassContext) -> float:
        """Prune the layers of ``plan`` in place; returns the norm of all changes relative to that of the weights."""
        squares = [0.0, 0.0]

        def replace(group: SharedInput, solution: Mapping[str, Tensor], walk: Walk | None = None) -> None:
            for index, site in enumerate(group.sites):
                node = ops.weight(site.nodes[0])
                old, new = graph.weight_value(node), solution[f"{index}.weight"]
                squares[0] += float((new - old).square().sum())
                squares[1] += float(old.square().sum())
                graph.set_weight(node, new)

        groups = by_activation(plan.sites)
        if self.config.method == "magnitude":
            for group in groups:
                weights = (graph.linear_weight(site.nodes[0]) for site in group.sites)
                replace(group, {f"{index}.weight": magnitude(weight) for index, weight in enumerate(weights)})
        else:
            windows = ctx.calibration_windows(self.config.calibration)
            walk_through(
                Walk(graph, windows, ctx.target),
                groups,
                lambda group, walk: self.solve(graph, group, walk),
                replace,
                FinishedGroups(ctx.workspace, "two_four"),
                lambda text, part=None: ctx.progress(f"{self.name}: {text}", part=part),
            )
        return float((squares[0] / max(squares[1], 1e-30)) ** 0.5)

    def solve(self, graph: Graph, group: SharedInput, walk: Walk) -> dict[str, Tensor]:
        """The pruned weights of a group, by ``index.weight``; the graph is not changed."""
        moments, found = Moments(walk.values(group.x)), dict[str, Tensor]()
        for index, site in enumerate(group.sites):
            weight = graph.linear_weight(site.nodes[0])
            if self.config.method == "wanda":
                found[f"{index}.weight"] = wanda(weight, moments.hessian)
            else:
                found[f"{index}.weight"] = sparsegpt(weight, moments.hessian, self.config.damping)
        return found
