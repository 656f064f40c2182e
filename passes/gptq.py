"""gptq: linear layers on integer grids, with each rounding error compensated by weights not yet rounded.

The solver is ``gptq_solver`` (arXiv 2210.17323), the calibration ``calibrated``. ``actorder: static`` rounds the
channels with the largest activations first and keeps the order of the groups, so nothing is reordered at run time.
``actorder: group`` is the original method, a little better at few bits, and stores each channel's group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field, model_validator
from torch import Tensor

from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.passes.base import PassContext, Plan, Site
from optkit.passes.quantization.awq_search import search_clip
from optkit.passes.quantization.calibrated import (
    CalibratedConfig,
    CalibratedQuantization,
    Moments,
)
from optkit.passes.quantization.cost import Rates, Shapes, Text
from optkit.passes.quantization.formats import PackedFormat, WeightFormat
from optkit.passes.quantization.gptq_solver import ActOrder, gptq
from optkit.passes.quantization.grid import Grid, QuantizedWeight
from optkit.passes.quantization.overrides import LayerOverrides
from optkit.passes.quantization.schemes import SCHEME_OPTIONS
from optkit.passes.quantization.targets import members


class GPTQOptions(CalibratedConfig):
    """Options of the solver, for ``gptq`` and ``mixed_precision``."""

    damping: float = Field(0.01, gt=0, le=1, description="of the mean of H's diagonal, added to it")
    actorder: ActOrder | None = Field("static", description="round channels of large activations first")
    clip: bool = Field(True, description="shrink groups' ranges where that costs less; needs static groups")

    @model_validator(mode="after")
    def groups_can_be_stored(self) -> Any:
        if self.actorder == "group" and not isinstance(self.format(), PackedFormat):
            raise ValueError(
                f"actorder 'group' needs a weight-only scheme of 4 bits or fewer, not {self.scheme}"
            )
        return self


class GPTQConfig(LayerOverrides, GPTQOptions):
    overridable = (*SCHEME_OPTIONS, "damping", "actorder", "clip")


class GPTQ(CalibratedQuantization):
    name = "gptq"
    Config: ClassVar[type[GPTQOptions]] = GPTQConfig

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        plan = super().check(graph, ctx)
        for site in plan.sites:
            (node,) = site.nodes
            grouped = self.config_for(graph, node).actorder == "group"
            if grouped and len(members(graph, node, site.name)) > 1:
                raise UserError(
                    f"actorder 'group' gives every layer an order of its own, and {site.name} is several in one",
                    where="gptq",
                    fix="set actorder: static, or leave fuse_qkv and fuse_gate_up out of the recipe",
                )
        return plan

    def solve_weight(
        self, graph: Graph, site: Site, weight: Tensor, fmt: WeightFormat, moments: Moments
    ) -> dict[str, Tensor]:
        (node,) = site.nodes
        return fmt.pack(solution(self.config_for(graph, node), weight, fmt.grid, moments.hessian))

    def seconds(
        self, rates: Rates, layers: Sequence[Shapes], text: Text, walks: tuple[float, float]
    ) -> float:
        return walks[1] + rates.hessians(layers, text) + self.solving(rates, layers)

    def solving(self, rates: Rates, layers: Sequence[Shapes]) -> float:
        every = [shape for shapes in layers for shape in shapes]
        return rates.gptq(every) + (rates.clips(every) if clips(self.config) else 0.0)


def clips(config: GPTQOptions) -> bool:
    """True where ranges are searched: static grids, known before the first column is rounded."""
    return bool(config.clip and config.actorder == "static")


def solution(config: GPTQOptions, weight: Tensor, grid: Grid, hessian: Tensor) -> QuantizedWeight:
    """Weight [N, K] on ``grid``, as ``config`` says."""
    return gptq(
        weight,
        hessian,
        grid,
        damping=config.damping,
        actorder=config.actorder,
        fitted=search_clip(weight, grid, hessian) if clips(config) else None,
    )
