"""The common parts of passes that quantize linear layers by calibration: walk, statistics, continuation of killed runs.

Layers on the same activation form a *group*. Groups are taken in execution order. The graph runs up to the group's
activation, with the rounding of all earlier layers in effect (GPTQ's "true sequential"); the activation's statistics
are collected, window by window; the layers are quantized and replaced; the walk goes on through the replaced layers.
So each layer runs once, and memory holds the activations between two layers.

The solution of every finished group is written to disk at once, and the walk once a layer. After a killed run, the next
run applies the written solutions and goes on, from the same numbers: the result is the same to the byte.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, fx

from optkit.calibration.samples import Calibration
from optkit.calibration.walk import Walk
from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.passes.base import PassContext, PassResult, Plan, Progress, Site
from optkit.passes.quantization.cost import (
    CalibrationCost,
    Rates,
    Shapes,
    Text,
    estimate,
    estimate_text,
    measure_rates,
    measured_text,
)
from optkit.passes.quantization.coverage import TOKENS, Coverage, RowsOfExperts
from optkit.passes.quantization.formats import WeightFormat
from optkit.passes.quantization.gptq_solver import add_products, mirrored
from optkit.passes.quantization.linear import LinearQuantization, weight_stats
from optkit.passes.quantization.resume import FinishedGroups
from optkit.passes.quantization.rewriter import QuantizedLinearRewriter
from optkit.passes.quantization.schemes import SchemeConfig


class CalibratedConfig(SchemeConfig):
    calibration: Calibration = Field(
        default_factory=lambda: Calibration(), description="the text to calibrate on"
    )
    expert_tokens: int = Field(
        64,
        ge=1,
        description="calibration tokens that an expert must see; with fewer it is rounded to nearest",
    )


@dataclass(frozen=True)
class SharedInput:
    """Linear layers with a common input."""

    sites: tuple[Site, ...]

    @property
    def x(self) -> fx.Node:
        """The activation in the present graph: the producer may have been replaced."""
        return ops.activation(self.sites[0].nodes[0])

    @property
    def name(self) -> str:
        return self.sites[0].name

    @property
    def experts(self) -> fx.Node | None:
        """The experts of tokens, for a layer of experts."""
        node = self.sites[0].nodes[0]
        return ops.argument(node, "experts") if node.target is reference.expert_linear else None


class Moments:
    """Statistics of an activation [T, K] over all windows.

    Attributes:
        hessian: the mean of x x^T, [K, K].
        mean: the mean of |x|, [K].
    """

    def __init__(self, values: Iterable[Tensor]) -> None:
        count = 0
        for x in values:
            x = x.flatten(0, -2)
            if not count:
                self.hessian = torch.zeros(x.shape[1], x.shape[1])
                self.mean = torch.zeros(x.shape[1])
            count += len(x)
            add_products(self.hessian, x)
            self.mean += x.abs().sum(dim=0)
        self.hessian = mirrored(self.hessian) / count
        self.mean /= count


class CalibratedQuantization(LinearQuantization):
    """A quantizer with statistics of each layer's activations."""

    def format_for(self, graph: Graph, node: fx.Node, name: str) -> WeightFormat | str:
        config = self.config_for(graph, node)
        return config if isinstance(config, str) else config.format_for(graph, node)

    @abstractmethod
    def solve_weight(
        self, graph: Graph, site: Site, weight: Tensor, fmt: WeightFormat, moments: Moments
    ) -> dict[str, Tensor]:
        """The operands of weight [N, K] of a site, or of one of its experts; the graph is not changed."""

    def solve(self, graph: Graph, group: SharedInput, walk: Walk) -> dict[str, Tensor]:
        """The operands of the group's quantized layers, by ``index.operand``; the graph is not changed."""
        if group.experts is not None:
            return self.solve_experts(graph, group, walk)
        moments, found = Moments(walk.values(group.x)), dict[str, Tensor]()
        for index, site in enumerate(group.sites):
            node, fmt = self.site_format(graph, site)
            solved = self.solve_weight(graph, site, graph.linear_weight(node), fmt, moments)
            found |= {f"{index}.{key}": tensor for key, tensor in solved.items()}
        return found

    def solve_experts(self, graph: Graph, group: SharedInput, walk: Walk) -> dict[str, Tensor]:
        """The operands of a layer of experts, each solved from its own tokens, and the number of tokens of each.

        An expert with fewer tokens than ``expert_tokens`` is rounded to nearest: a Hessian of few tokens has few
        directions, and the solver would fit the noise in the others.
        """
        (site,) = group.sites
        node, fmt = self.site_format(graph, site)
        count = ops.argument(node, "num_experts")
        weights = graph.linear_weight(node).unflatten(0, (count, -1))
        rows = RowsOfExperts(walk, group.x, ops.argument(node, "experts"), count)
        solved = []
        for expert, weight in enumerate(weights):
            if rows.tokens[expert] < self.config.expert_tokens:
                solved.append(fmt.round(weight))
            else:
                moments = Moments(rows.of(expert))
                solved.append(self.solve_weight(graph, site, weight, fmt, moments))
        found = {f"0.{key}": torch.cat([each[key] for each in solved]) for key in solved[0]}
        return found | {TOKENS: rows.tokens}

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        if not plan.sites:
            return PassResult(0)
        if graph.is_meta:
            return super().apply(graph, plan, ctx)
        before, groups = graph.num_bytes(), by_activation(plan.sites)
        windows = ctx.calibration_windows(self.config.calibration)
        expected = self.expected(graph, groups, Text.of(windows), ctx)
        ctx.progress(f"{self.name}: calibrating on {len(windows)} samples, {estimate_text(expected)}")
        start = time.monotonic()
        self.prepare(graph, groups, windows, ctx)
        rewriter = QuantizedLinearRewriter(graph, self.config.max_tokens)
        coverage = Coverage(self.config.expert_tokens)

        def put_back(group: SharedInput, solution: Mapping[str, Tensor], walk: Walk) -> None:
            if TOKENS in solution:
                coverage.add(group.name, solution[TOKENS])
            for index, site in enumerate(group.sites):
                fmt = self.site_format(graph, site)[1]
                own = {
                    key: solution[f"{index}.{key}"] for key in fmt.operands if f"{index}.{key}" in solution
                }
                rewriter.replace(site, fmt, own)

        walk_through(
            Walk(graph, windows, ctx.target),
            groups,
            lambda group, walk: self.solve(graph, group, walk),
            put_back,
            FinishedGroups(ctx.workspace, "codes"),
            lambda text, part=None: ctx.progress(f"{self.name}: {text}", part=part),
        )
        rewriter.finish()
        stats = (
            weight_stats(before, graph) | {"calibration_tokens": sum(map(len, windows))} | coverage.stats()
        )
        ctx.progress(f"{self.name}: calibrated, {measured_text(expected, time.monotonic() - start)}")
        return PassResult(len(plan.sites), stats)

    def expected(
        self, graph: Graph, groups: Sequence[SharedInput], text: Text, ctx: PassContext
    ) -> CalibrationCost:
        """Time and memory of ``apply``."""
        layers = [shapes(graph, group) for group in groups]
        after = graph.clone()
        rewriter, by_name = QuantizedLinearRewriter(after), {node.name: node for node in after.fx.nodes}
        for site in (site for group in groups for site in group.sites):
            fmt = self.site_format(graph, site)[1]
            planned = fmt.meta_tensors(*graph.linear_shape(site.nodes[0]))
            rewriter.replace(Site(site.name, (by_name[site.nodes[0].name],)), fmt, planned)
        after.prune()
        rates = measure_rates(layers, text, self.site_format(graph, groups[0].sites[0])[1].grid)
        walks = rates.walk(graph, text, ctx.target), rates.walk(after, text, ctx.target)
        seconds = self.seconds(rates, layers, text, walks)
        cost = estimate(graph, [group.x for group in groups], layers, text, seconds)
        return replace(cost, num_bytes=cost.num_bytes + self.held_bytes(graph, text))

    def held_bytes(self, graph: Graph, text: Text) -> int:
        """Bytes of the pass besides the walk and the solver."""
        return 0

    @abstractmethod
    def seconds(
        self, rates: Rates, layers: Sequence[Shapes], text: Text, walks: tuple[float, float]
    ) -> float:
        """Seconds of calibration; ``walks`` are the seconds over the float graph and over the quantized graph."""

    def prepare(
        self, graph: Graph, groups: list[SharedInput], windows: Sequence[Sequence[int]], ctx: PassContext
    ) -> None:
        """Change the float model before quantization; must be exact."""


def walk_through(
    walk: Walk,
    groups: Sequence[SharedInput],
    solve: Callable[[SharedInput, Walk], dict[str, Tensor]],
    replace: Callable[[SharedInput, Mapping[str, Tensor], Walk], None],
    finished: FinishedGroups,
    progress: Progress,
) -> None:
    """Solve group after group and put each solution into the graph before the walk goes on."""
    attentions, count = 0, finished.count()
    for index, group in enumerate(groups):
        if index < count:
            solution = finished.load(index)
        else:
            finished.catch_up(walk, index)
            progress(group.name, part=(index, len(groups)))
            solution = solve(group, walk)
            finished.save(index, solution)
        replace(group, solution, walk)
        passed = sum(node.target is reference.attention for node in walk.done)
        if index >= count and passed > attentions:
            finished.save_walk(index, walk.state())
            attentions = passed


def collect(
    graph: Graph,
    groups: Sequence[SharedInput],
    windows: Sequence[Sequence[int]],
    solve: Callable[[SharedInput, Walk], Tensor],
    key: str,
    ctx: PassContext,
    name: str,
) -> list[Tensor]:
    """The results of ``solve`` for each group on the unchanged graph; finished results are kept under ``key``.

    ``name`` is the name of the pass, for progress.
    """
    found: list[Tensor] = []
    walk_through(
        Walk(graph, windows, ctx.target),
        groups,
        lambda group, walk: {key: solve(group, walk)},
        lambda group, solution, walk: found.append(solution[key]),
        FinishedGroups(ctx.workspace, key),
        lambda text, part=None: ctx.progress(f"{name}: {text}", part=part),
    )
    return found


def by_activation(sites: Iterable[Site]) -> list[SharedInput]:
    """Sites grouped by input activation, in execution order."""
    found: dict[tuple[fx.Node, bool], list[Site]] = {}
    for site in sites:
        (node,) = site.nodes
        of_experts = node.target is reference.expert_linear  # which see their own tokens only
        found.setdefault((ops.activation(node), of_experts), []).append(site)
    return [SharedInput(tuple(of_x)) for of_x in found.values()]


def shapes(graph: Graph, group: SharedInput) -> list[Any]:
    """[N, K] of each layer of a group; of experts those of each expert."""
    found: list[Any] = []
    for site in group.sites:
        (node,) = site.nodes
        count = 1 if group.experts is None else ops.argument(node, "num_experts")
        rows, k = graph.linear_shape(node)
        found += [(rows // count, k)] * count
    return found
