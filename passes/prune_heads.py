"""prune_heads: removes the least important attention heads, in whole KV groups, the same number in every layer.

A KV head is removed together with the group's query heads: rows of the query, key and value projections, columns of the
output projection. The importance of a group is the contribution of the query heads: the mean of ``|a_j|`` over
calibration text times ``|w_j|``, the norm of column j of the output projection, added over the group's channels
(activation-weighted magnitudes as in Wanda, arXiv 2306.11695, for whole heads; removing heads as in arXiv 1905.10650).
The result is a smaller dense model with a smaller KV cache, under the same bounds as a quantizer.

config.json has a single number of heads for all layers, so all layers lose equally many, and ``head_dim`` is written
out: a model whose config in transformers derives ``head_dim`` from the number of heads is refused. Where a layer can't
be pruned, no layer is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
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
from optkit.passes.prune_ffn import importance, select_columns
from optkit.passes.quantization.calibrated import SharedInput, collect
from optkit.passes.rewriting.heads import Heads, heads_at, heads_of
from optkit.passes.rewriting.stack import site_name


class PruneHeadsConfig(Config):
    share: float = Field(0.25, gt=0, lt=1, description="share of each layer's KV groups to remove")
    calibration: Calibration = Field(
        default_factory=lambda: Calibration(samples=16), description="the text that importance is measured on"
    )


class PruneHeads(Pass):
    name = "prune_heads"
    stage = Stage.TRANSFORM
    exact = False
    Config = PruneHeadsConfig

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        """Find the layers to prune; the node of a site is the output projection."""
        plan, shapes = Plan(), set()
        for attention in graph.calls(reference.attention):
            found = heads_of(graph, attention)
            if any(ops.argument(attention, name) is not None for name in ("sinks", "slopes")):
                found = "it has sinks or slopes, a number for each head"
            if isinstance(found, str):
                plan.skips.append(Skip(f"attention {attention.name}", found))
            else:
                plan.sites.append(Site(site_name(graph, found.out), (found.out,)))
                shapes.add(found.shape)
        reason = self.why_none(graph, plan, shapes)
        if reason:
            plan.skips += [Skip(site.name, reason) for site in plan.sites]
            plan.sites.clear()
        return plan

    def why_none(self, graph: Graph, plan: Plan, shapes: set[Any]) -> str | None:
        """The reason against removing equally many groups from all layers, or None."""
        if plan.skips:
            return f"the number of heads is one for all layers, and {plan.skips[0].site} can't be pruned"
        if len(shapes) > 1:
            return "the layers have different heads, and their number is one in config.json"
        for _, groups, size, values in shapes:
            if not names_head_size(graph.meta.model_type) or size != values:
                return f"the config of a {graph.meta.model_type} model has no head size of its own"
            if self.kept(groups) == groups:
                return f"{groups} KV groups less {self.config.share:.0%} are as many"
        return None

    def kept(self, groups: int) -> int:
        """The number of KV groups to keep, at least 1."""
        return max(1, round(groups * (1 - self.config.share)))

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        before = graph.num_bytes()
        layers = [heads_at(graph, site) for site in plan.sites]
        heads, groups, size, _ = layers[0].shape
        kept = self.kept(groups)
        for layer, index in zip(layers, self.choices(graph, plan, kept, ctx), strict=True):
            remove(graph, layer, index)
        after = {"num_attention_heads": kept * heads // groups, "num_key_value_heads": kept, "head_dim": size}
        graph.annotations["config"] = {**graph.annotations.get("config", {}), **after}
        specs = tuple(replace(spec, num_kv_heads=kept) for spec in graph.meta.kv_specs)
        graph.meta = graph.meta.with_kv_specs(specs)
        stats = {"heads_before": heads, "kv_heads_before": groups, **after}
        return PassResult(
            len(plan.sites), stats | {"weight_bytes_before": before, "weight_bytes_after": graph.num_bytes()}
        )

    def choices(self, graph: Graph, plan: Plan, kept: int, ctx: PassContext) -> list[Tensor]:
        """The KV groups [kept] to keep of each site, in order. A dry run, without values, takes the first."""
        if graph.is_meta:
            return [torch.arange(kept) for _ in plan.sites]
        windows = ctx.calibration_windows(self.config.calibration)

        def solve(group: SharedInput, walk: Walk) -> Tensor:
            layer = heads_at(graph, group.sites[0])
            weight = graph.linear_weight(layer.out)
            score = importance([x.flatten(1) for x in walk.values(group.x)], weight)
            return score.unflatten(0, (layer.shape[1], -1)).sum(dim=1).topk(kept).indices.sort().values

        return collect(
            graph, [SharedInput((site,)) for site in plan.sites], windows, solve, "heads", ctx, self.name
        )


@cache
def names_head_size(model_type: str) -> bool:
    """True where transformers' config of the architecture has the size of a head beside the number of heads."""
    from transformers import CONFIG_MAPPING

    fields = ("num_attention_heads", "num_key_value_heads", "head_dim")
    return model_type in CONFIG_MAPPING and all(hasattr(CONFIG_MAPPING[model_type](), f) for f in fields)


# -- removing ----------------------------------------------------------------------------------------------


def remove(graph: Graph, layer: Heads, groups: Tensor) -> None:
    """Keep only the KV ``groups`` [G] of a layer and their query heads."""
    heads, before, size, values = layer.shape
    per_group = heads // before
    query = (groups[:, None] * per_group + torch.arange(per_group)).flatten()
    rows = [channels(query, size), channels(groups, size), channels(groups, values)]
    sizes = [heads * size, before * size, before * values]
    if len(layer.projections) == 3:
        for linear, index in zip(layer.projections, rows, strict=True):
            select_stacked_rows(graph, linear, [index], [graph.linear_shape(linear)[0]])
    else:
        (linear,) = layer.projections
        select_stacked_rows(graph, linear, rows, sizes)
        split = layer.reshapes[0].args[0].args[0]
        split.args = (split.args[0], [len(index) for index in rows], -1)
    select_columns(graph, layer.out, channels(query, values))
    for reshape, count in zip(layer.reshapes, (len(query), len(groups), len(groups)), strict=True):
        reshape.args = (reshape.args[0], [-1, count, reshape.args[1][2]])
    layer.joined.args = (layer.joined.args[0], [-1, len(query) * values])


def channels(heads: Tensor, size: int) -> Tensor:
    """The channels of ``heads`` [H], each of ``size``: [H * size]."""
    return (heads[:, None] * size + torch.arange(size)).flatten()


def select_stacked_rows(graph: Graph, linear: fx.Node, index: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Keep the rows ``index`` of each piece of a linear's weight and bias, whose rows are pieces of ``sizes``."""
    starts = [0, *accumulate(sizes)]
    rows = torch.cat([piece + start for piece, start in zip(index, starts, strict=False)])
    for argument in (ops.weight(linear), ops.bias(linear)):
        weight = graph.weight_of(argument)
        if weight is None or weight.origin is None:
            continue
        parts = weight.origin.parts
        counts = [len(piece) for piece in index] if len(parts) == len(index) else [len(rows)]
        new = tuple(Part(part.name, count) for part, count in zip(parts, counts, strict=True))
        value = weight.value
        value = value[rows.to(value.device)].contiguous()
        graph.weights[str(argument.target)] = graph.new_weight(value, Origin(new, weight.origin.transposed))
