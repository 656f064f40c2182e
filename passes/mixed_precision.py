"""mixed_precision: a precision for every layer, under a budget for all.

Each layer is quantized alone by GPTQ and the KL divergence of the model's outputs is measured; then ``assignment``
gives the larger formats to the layers where a byte (or a millisecond of decode, by the roofline) removes most
divergence. The budget is ``bits`` a weight, ``max_bytes``, or the divergence ``max_kld`` to be reached with the fewest
bytes. Finally all layers are quantized together by GPTQ. With ``lm_head: true`` the output head takes part.

Of several ``schemes`` with the same treatment of activations, the scheme with the largest error is measured. Divergence
is quadratic in small errors, so divergences of other schemes follow from the squared errors of the layer's outputs
(rounded to nearest; GPTQ compensates about the same share of each). A budget of divergence also needs the cost of
rounding the activations alone, and measures all schemes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, fx

from optkit.calibration.walk import Walk
from optkit.errors import UserError
from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point, infer_shapes
from optkit.lowering.cost import node_cost
from optkit.passes.base import PassContext, PassResult, Plan, Site
from optkit.passes.gptq import GPTQ, GPTQOptions, solution
from optkit.passes.quantization.assignment import Choice, assign
from optkit.passes.quantization.calibrated import Moments, SharedInput, walk_through
from optkit.passes.quantization.cost import Rates, Shapes, Text
from optkit.passes.quantization.formats import WeightFormat
from optkit.passes.quantization.gptq_solver import output_error
from optkit.passes.quantization.grid import round_to_nearest
from optkit.passes.quantization.resume import FinishedGroups
from optkit.passes.quantization.rewriter import QuantizedLinearRewriter
from optkit.passes.quantization.schemes import fitting, make_format
from optkit.passes.quantization.sensitivity import EVERY, Divergence
from optkit.recipe.schema import Bytes

DECODE = Point(1, 1, 512)


class MixedPrecisionConfig(GPTQOptions):
    schemes: list[str] = Field(
        default_factory=lambda: ["W4A8", "W8A8"], min_length=2, max_length=8,
        description="what a layer may get, as 'W4A8' or with a group size 'W4A8:64'",
    )  # fmt: skip
    bits: float | None = Field(None, gt=1, le=32, description="budget: mean bits a weight, scales included")
    max_bytes: Bytes | None = Field(None, description="budget: bytes of all layers that take part")
    max_kld: float | None = Field(
        None, gt=0, description="budget: the divergence to stay within, with least bytes"
    )
    price: str = Field("bytes", pattern="^(bytes|milliseconds)$", description="what an upgrade is judged by")
    sensitivity_tokens: int = Field(
        1024, ge=16, le=1 << 16, description="tokens that sensitivity is measured on, in whole samples"
    )

    @model_validator(mode="after")
    def one_budget(self) -> Any:
        if sum(value is not None for value in (self.bits, self.max_bytes, self.max_kld)) != 1:
            raise ValueError("give one of bits, max_bytes and max_kld")
        for scheme in self.schemes:
            parsed(scheme)
        return self


def parsed(scheme: str) -> WeightFormat:
    """``W4A8:64`` as a format."""
    name, _, group = scheme.partition(":")
    if group and not group.isdecimal():
        raise ValueError(f"'{scheme}' is not a scheme, or a scheme and a group size like 'W4A8:64'")
    return make_format(name, int(group) if group else None)


class MixedPrecision(GPTQ):
    name = "mixed_precision"
    Config = MixedPrecisionConfig
    takes_experts = False  # their errors are not measured

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.assigned: dict[str, WeightFormat] = {}
        self.result: dict[str, Any] = {}

    def format_for(self, graph: Graph, node: fx.Node, name: str) -> WeightFormat | str:
        """The assigned format; before the assignment the format of the last scheme."""
        if name in self.assigned:
            return self.assigned[name]
        choices = self.choices(graph, node)
        return choices[-1]

    def choices(self, graph: Graph, node: fx.Node) -> list[WeightFormat | str]:
        """The format of each scheme for a linear, or the reason against the scheme."""
        k = graph.linear_shape(node)[1] if graph.weight_of(ops.weight(node)) else 0
        return [
            fitting(parsed(s), s.partition(":")[0], k, self.config.uneven_groups) for s in self.config.schemes
        ]

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        result = super().apply(graph, plan, ctx)
        return PassResult(result.changed, result.stats | self.result)  # a dry run has no result of its own

    def seconds(
        self, rates: Rates, layers: Sequence[Shapes], text: Text, walks: tuple[float, float]
    ) -> float:
        """GPTQ, once more for each scheme on the float graph; and half a forward pass for each variant."""
        count = sum(map(len, layers)) * (len(self.config.schemes) if self.config.max_kld else 1)
        measured = min(self.config.sensitivity_tokens, text.tokens) / text.tokens
        sensitivity = walks[0] * (1 + measured * count / 2) + rates.hessians(layers, text)
        solving = self.solving(rates, layers) * (len(self.config.schemes) if self.config.max_kld else 1)
        return super().seconds(rates, layers, text, walks) + sensitivity + solving

    def held_bytes(self, graph: Graph, text: Text) -> int:
        """Bytes of the float model's logits, of a variant's logits and of probabilities."""
        windows = -(-min(self.config.sensitivity_tokens, text.tokens) // text.longest)
        return 4 * graph.meta.vocab_size * (text.longest // EVERY) * (windows + 2)

    def prepare(
        self, graph: Graph, groups: list[SharedInput], windows: Sequence[Sequence[int]], ctx: PassContext
    ) -> None:
        """Measure every layer alone in every scheme, and assign."""
        formats = {site.name: self.usable(graph, site, ctx) for group in groups for site in group.sites}
        losses = self.measure(graph, groups, formats, windows, ctx)
        sites = [site for group in groups for site in group.sites]
        sizes = {site.name: graph.linear_shape(site.nodes[0]) for site in sites}
        choices = [
            [
                Choice(loss, fmt.num_bytes(*sizes[site.name]), self.price(graph, site, fmt, ctx))
                for fmt, loss in zip(formats[site.name], losses[site.name], strict=True)
            ]
            for site in sites
        ]
        weights = sum(n * k for n, k in sizes.values())
        limit = self.config.max_bytes or (self.config.bits * weights / 8 if self.config.bits else None)
        try:
            chosen = assign(choices, limit, self.config.max_kld)
        except ValueError as error:
            fix = "raise the budget, or add a scheme of fewer bits or more"
            raise UserError(f"{error}", where="mixed_precision", fix=fix) from error
        picked = [options[i] for options, i in zip(choices, chosen, strict=True)]
        for site, i in zip(sites, chosen, strict=True):
            self.assigned[site.name] = formats[site.name][i]
        self.result = {
            "bits_per_weight": 8 * sum(choice.size for choice in picked) / weights,
            "expected_kld": sum(choice.loss for choice in picked),
            "assigned": count_by_scheme(self.config.schemes, chosen),
            "most_sensitive": sorted(sites_by_loss(sites, choices), key=lambda row: -row[1])[:10],
            "upgraded": [site.name for site, i in zip(sites, chosen, strict=True) if i],
        }
        ctx.progress(
            f"{self.name}: {self.result['bits_per_weight']:.2f} bits a weight, {self.result['assigned']}"
        )

    def usable(self, graph: Graph, site: Site, ctx: PassContext) -> list[WeightFormat]:
        """The formats for a layer; the last scheme's format replaces formats that the target does not run."""
        (node,) = site.nodes
        n, k = graph.linear_shape(node)
        found = self.choices(graph, node)
        last = found[-1]
        assert isinstance(last, WeightFormat)
        return [last if isinstance(f, str) or f.lacks(n, k, ctx.target) else f for f in found]

    def price(self, graph: Graph, site: Site, fmt: WeightFormat, ctx: PassContext) -> float:
        """Bytes, or milliseconds of a decode step by the roofline."""
        n, k = graph.linear_shape(site.nodes[0])
        if self.config.price == "bytes":
            return fmt.num_bytes(n, k)
        clone, ours = alone(graph, site, fmt, fmt.meta_tensors(n, k))
        return 1e3 * node_cost(clone, ours, infer_shapes(clone, DECODE), DECODE).seconds(ctx.target)

    def measure(
        self,
        graph: Graph,
        groups: Sequence[SharedInput],
        formats: Mapping[str, Sequence[WeightFormat]],
        windows: Sequence[Sequence[int]],
        ctx: PassContext,
    ) -> dict[str, list[float]]:
        """KL divergence of each site alone, in each format of the site."""
        walk = Walk(graph, windows, ctx.target)
        divergence: list[Divergence] = []
        losses: dict[str, list[float]] = {}

        def solve(group: SharedInput, walk: Walk) -> dict[str, Tensor]:
            if not divergence:
                divergence.append(Divergence(graph, walk, self.config.sensitivity_tokens))
            moments = Moments(walk.values(group.x))
            return {
                str(index): torch.tensor(
                    self.site_losses(graph, site, formats[site.name], moments.hessian, divergence[0])
                )
                for index, site in enumerate(group.sites)
            }

        def replace(group: SharedInput, solution: Mapping[str, Tensor], walk: Walk) -> None:
            for index, site in enumerate(group.sites):
                losses[site.name] = solution[str(index)].tolist()

        walk_through(
            walk, groups, solve, replace, FinishedGroups(ctx.workspace, "sensitivity"),
            lambda text, part=None: ctx.progress(f"{self.name}: sensitivity of {text}", part=part),
        )  # fmt: skip
        return losses

    def site_losses(
        self,
        graph: Graph,
        site: Site,
        formats: Sequence[WeightFormat],
        hessian: Tensor,
        divergence: Divergence,
    ) -> list[float]:
        """KL divergence of a site in each format; the walk stands at the site's input."""
        weight = graph.linear_weight(site.nodes[0])
        errors = [rounding_error(weight, fmt, hessian) for fmt in formats]
        measured: dict[Any, tuple[float, float]] = {}
        for fmt, error in sorted(zip(formats, errors, strict=True), key=lambda pair: -pair[1]):
            if treatment(fmt) not in measured or self.config.max_kld:
                rounded = solution(self.config, weight, fmt.grid, hessian)
                loss = divergence.of(alone(graph, site, fmt, fmt.pack(rounded))[0])
                measured[fmt] = measured[treatment(fmt)] = loss, error
        return [expected_loss(fmt, error, measured) for fmt, error in zip(formats, errors, strict=True)]


def rounding_error(weight: Tensor, fmt: WeightFormat, hessian: Tensor) -> float:
    """Squared error of a layer's outputs with weights rounded to nearest."""
    rounded = round_to_nearest(weight, fmt.grid).dequantize(fmt.grid.group_size)
    return output_error(weight, rounded, hessian)


def expected_loss(fmt: WeightFormat, error: float, measured: Mapping[Any, tuple[float, float]]) -> float:
    """The measured divergence of ``fmt``, or an estimate from a format with equal treatment of activations."""
    if fmt in measured:
        return measured[fmt][0]
    loss, of_error = measured[treatment(fmt)]
    return loss * error / of_error if of_error else loss


def treatment(fmt: WeightFormat) -> tuple[bool, int]:
    """The treatment of activations by a format."""
    return fmt.quantizes_input, fmt.activation_group_size if fmt.quantizes_input else 0


def alone(
    graph: Graph, site: Site, fmt: WeightFormat, tensors: Mapping[str, Tensor]
) -> tuple[Graph, fx.Node]:
    """A clone with ``site`` alone quantized, and the quantized op."""
    clone = graph.clone()
    node = next(n for n in clone.fx.nodes if n.name == site.nodes[0].name)
    op = QuantizedLinearRewriter(clone).replace(Site(site.name, (node,)), fmt, tensors)
    clone.prune()
    return clone, op


def count_by_scheme(schemes: Sequence[str], chosen: Sequence[int]) -> dict[str, int]:
    return {scheme: sum(i == index for i in chosen) for index, scheme in enumerate(schemes)}


def sites_by_loss(sites: Sequence[Site], choices: Sequence[Sequence[Choice]]) -> list[tuple[str, float]]:
    return [(site.name, options[0].loss) for site, options in zip(sites, choices, strict=True)]
