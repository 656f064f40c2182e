"""awq: linear layers on integer grids, with channels scaled to protect the important channels, and ranges clipped.

The searches are ``awq_search`` (arXiv 2306.00978), the calibration ``calibrated``. There are two walks. The first walk
finds the scales. A scale is folded into the norm or the up projection before the layers, so the float model stays
equivalent. The second walk clips and rounds. Layers without a place for scales (the attention's output projection) are
only clipped, as are experts, whose activation the router reads too. Query and key projections are not clipped, as in
the paper's code: the products go into a softmax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from pydantic import Field
from torch import Tensor, fx

from optkit.calibration.walk import Walk
from optkit.graph import ops
from optkit.graph.ir import Graph, module_name
from optkit.kernels import reference
from optkit.passes.base import PassContext, Site
from optkit.passes.quantization.awq_search import search_clip, search_scale
from optkit.passes.quantization.calibrated import (
    CalibratedConfig,
    CalibratedQuantization,
    Moments,
    SharedInput,
    walk_through,
)
from optkit.passes.quantization.cost import Rates, Shapes, Text
from optkit.passes.quantization.formats import WeightFormat
from optkit.passes.quantization.grid import QuantizedWeight, fit_groups, group_of, nearest_codes
from optkit.passes.quantization.overrides import LayerOverrides
from optkit.passes.quantization.resume import FinishedGroups
from optkit.passes.quantization.schemes import SCHEME_OPTIONS
from optkit.passes.rewriting.folding import fold, readers, why_not_foldable

UNCLIPPED = ("q_proj", "k_proj", "query", "key")


class AWQConfig(LayerOverrides, CalibratedConfig):
    overridable = (*SCHEME_OPTIONS, "clip")

    duo_scaling: bool = Field(True, description="let weights' magnitudes count in the scale, too")
    clip: bool = Field(True, description="search the range of each group")


class AWQ(CalibratedQuantization):
    name = "awq"
    Config = AWQConfig

    def seconds(
        self, rates: Rates, layers: Sequence[Shapes], text: Text, walks: tuple[float, float]
    ) -> float:
        every = [shape for shapes in layers for shape in shapes]
        searches = rates.scales(every) + (rates.clips(every) if self.config.clip else 0.0)
        return sum(walks) + 2 * rates.hessians(layers, text) + searches

    def prepare(
        self, graph: Graph, groups: list[SharedInput], windows: Sequence[Sequence[int]], ctx: PassContext
    ) -> None:
        """Fold the scale of each group into the producer of the activation."""

        def scale(group: SharedInput, walk: Walk) -> dict[str, Tensor]:
            moments = Moments(walk.values(group.x))
            layers = [self.site_format(graph, site) for site in group.sites]
            weights, grids = (
                [graph.linear_weight(node) for node, _ in layers],
                [fmt.grid for _, fmt in layers],
            )
            duo = self.config.duo_scaling
            return {"scale": search_scale(weights, grids, moments.mean, moments.hessian, duo)}

        def replace(group: SharedInput, solution: Mapping[str, Tensor], walk: Walk) -> None:
            fold(graph, group.x, [site.nodes[0] for site in group.sites], solution["scale"])
            if group.x in walk.done:
                walk.change(group.x, 1 / solution["scale"])

        walk_through(
            Walk(graph, windows, ctx.target),
            [group for group in groups if can_scale(graph, group)],
            scale,
            replace,
            FinishedGroups(ctx.workspace, "scales", with_walk=True),
            lambda text, part=None: ctx.progress(f"{self.name}: scale of {text}", part=part),
        )

    def solve_weight(
        self, graph: Graph, site: Site, weight: Tensor, fmt: WeightFormat, moments: Moments
    ) -> dict[str, Tensor]:
        (node,) = site.nodes
        grid = fmt.grid
        scale, minimum = fit_groups(weight, grid)
        if self.config_for(graph, node).clip:
            of_experts = node.target is reference.expert_linear
            rows = torch.arange(len(weight)) if of_experts else clipped_rows(graph, site.name, node)
            scale[rows], minimum[rows] = search_clip(weight[rows], grid, moments.hessian)
        levels = group_of(weight.shape[1], grid.group_size)
        codes = nearest_codes(weight, scale[:, levels], minimum[:, levels], grid).to(torch.uint8)
        return fmt.pack(QuantizedWeight(codes, scale, minimum))


def can_scale(graph: Graph, group: SharedInput) -> bool:
    """True where the activation's producer takes a scale, and all readers are in the group."""
    if group.experts is not None:
        return False
    linears = [site.nodes[0] for site in group.sites]
    all_readers = set(readers(graph).get(group.x, [])) == set(linears)
    return all_readers and why_not_foldable(graph, group.x, linears) is None


def clipped_rows(graph: Graph, name: str, node: fx.Node) -> Tensor:
    """Rows of the weight to clip [.] int64: all but the rows of query and key projections."""
    weight = graph.weight_of(ops.weight(node))
    parts = weight.origin.parts if weight is not None and weight.origin is not None else ()
    rows = [part.rows for part in parts] or [graph.linear_shape(node)[0]]
    names = [module_name(part.name) for part in parts] or [name]
    keep = torch.cat(
        [
            torch.full((count,), module.rpartition(".")[2] not in UNCLIPPED)
            for module, count in zip(names, rows, strict=True)
        ]
    )
    return keep.nonzero()[:, 0]
