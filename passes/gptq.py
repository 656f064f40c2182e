"""gptq: linear layers on integer grids, each rounding made up for by the weights not yet rounded.

The solver is ``gptq_solver`` (arXiv 2210.17323), the calibration ``calibrated``. ``actorder: static`` rounds the
channels with the largest activations first and keeps groups as they are, so that nothing has to be reordered at run
time; ``group`` is the original's, a little better at few bits, and stores each channel's group.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator
from torch import Tensor

from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.passes.awq_search import search_clip
from optkit.passes.base import PassContext, Plan
from optkit.passes.calibrated import CalibratedConfig, CalibratedQuantization, Group, Moments
from optkit.passes.gptq_solver import ActOrder, gptq
from optkit.passes.linear_quantization import members, weight_of
from optkit.passes.weight_formats import PackedFormat


class GPTQConfig(CalibratedConfig):
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


class GPTQ(CalibratedQuantization):
    name = "gptq"
    Config = GPTQConfig

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        plan = super().check(graph, ctx)
        for site in plan.sites if self.config.actorder == "group" else ():
            if len(members(graph, site.nodes[0], site.name)) > 1:
                raise UserError(
                    f"actorder 'group' gives every layer an order of its own, and {site.name} is several in one",
                    where="gptq",
                    fix="set actorder: static, or leave fuse_qkv and fuse_gate_up out of the recipe",
                )
        return plan

    def solve(self, graph: Graph, group: Group, moments: Moments) -> dict[str, Tensor]:
        config = self.config
        found: dict[str, Tensor] = {}
        for index, site in enumerate(group.sites):
            node, form = self.site_format(graph, site)
            weight, grid = weight_of(graph, node), form.grid
            clipped = config.clip and config.actorder == "static"
            quantized = gptq(
                weight,
                moments.hessian,
                grid,
                damping=config.damping,
                actorder=config.actorder,
                fitted=search_clip(weight, grid, moments.hessian) if clipped else None,
            )
            found |= {f"{index}.{key}": tensor for key, tensor in form.pack(quantized).items()}
        return found
