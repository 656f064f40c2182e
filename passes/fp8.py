"""fp8: linear layers in float8 E4M3, per-channel weights and rounded activations (arXiv 2209.05433).

A weight row is scaled to E4M3's range, ``absmax / 448``, and rounded. ``FP8_DYNAMIC`` scales and rounds each token's
activations the same way. ``FP8`` has a single scale for a layer's activations, the largest value on calibration text
over 448: cheaper to apply, and larger values saturate. The names are llm-compressor's; on disk the layers are
compressed-tensors ``float-quantized``.

E4M3 has 3 bits of mantissa, so rounding is relative to each value: outliers hurt less than in int8, and all other
values are coarser. Hopper multiplies E4M3 natively. CPUs emulate E4M3 in float32, exactly and slowly: the pass is for
quality there, not for speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, fx

from optkit.calibration.samples import Calibration
from optkit.calibration.walk import Walk
from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.kernels.reference import FP8_MOST
from optkit.machine.target import Target
from optkit.passes.base import PassContext, PassResult, Plan
from optkit.passes.quantization.calibrated import SharedInput, by_activation, walk_through
from optkit.passes.quantization.formats import WeightFormat
from optkit.passes.quantization.grid import Grid, QuantizedWeight
from optkit.passes.quantization.linear import (
    LinearQuantization,
    LinearQuantizationConfig,
    weight_stats,
)
from optkit.passes.quantization.resume import FinishedGroups
from optkit.passes.quantization.rewriter import QuantizedLinearRewriter


class FP8Config(LinearQuantizationConfig):
    scheme: Literal["FP8_DYNAMIC", "FP8"] = Field(
        "FP8_DYNAMIC", description="activation scales: of each token, or static from calibration"
    )
    calibration: Calibration = Field(
        default_factory=lambda: Calibration(samples=16), description="the text for static scales (FP8)"
    )


@dataclass(frozen=True)
class Float8Format(WeightFormat):
    """E4M3 weights [N, K] with float32 scales [N, 1], and a static scale [1] for activations if ``static``."""

    static: bool = False
    label = "float8"
    op = staticmethod(reference.linear_fp8)
    quantizes_input = False

    @property
    def grid(self) -> Grid:
        raise TypeError("float8 values lie on no grid of integers")

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        raise TypeError("float8 values are no integer codes")

    def lacks(self, n: int, k: int, target: Target) -> str | None:
        return None  # the reference runs everywhere

    def options(self, weight: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"activations": "tensor" if self.static else "token"}

    def round(self, weight: Tensor) -> dict[str, Tensor]:
        values, scale = quantize_fp8(weight)
        return {"weight": values, "weight_scale": scale}

    def meta_tensors(self, n: int, k: int) -> dict[str, Tensor]:
        meta = torch.device("meta")
        tensors = {
            "weight": torch.empty(n, k, dtype=torch.float8_e4m3fn, device=meta),
            "weight_scale": torch.empty(n, 1, device=meta),
        }
        return tensors | ({"input_scale": torch.empty(1, device=meta)} if self.static else {})


class FP8(LinearQuantization):
    name = "fp8"
    Config = FP8Config

    def format_for(self, graph: Graph, node: fx.Node, name: str) -> WeightFormat | str:
        return Float8Format(self.config.scheme == "FP8")

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        """The layers to change.

        Raises:
            UserError: the target is a GPU without float8 units, where every product would be dequantized first.
        """
        if ctx.target.kind == "cuda" and not ctx.target.fp8_flops:
            raise UserError(
                f"{ctx.target.name} has no float8 units",
                where="passes.fp8",
                fix="use int8 in its place, or a target that has them, such as cuda-h100",
            )
        return super().check(graph, ctx)

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        if self.config.scheme == "FP8_DYNAMIC" or graph.is_meta or not plan.sites:
            return super().apply(graph, plan, ctx)
        before = graph.num_bytes()
        windows = ctx.calibration_windows(self.config.calibration)
        rewriter = QuantizedLinearRewriter(graph, self.config.max_tokens)

        def solve(group: SharedInput, walk: Walk) -> dict[str, Tensor]:
            absmax = torch.stack([x.abs().amax() for x in walk.values(group.x)]).amax()
            return {"input_scale": static_scale(absmax)}

        def replace(group: SharedInput, solution: Mapping[str, Tensor], walk: Walk) -> None:
            for site in group.sites:
                node, fmt = self.site_format(graph, site)
                own = {"input_scale": solution["input_scale"].clone()}
                rewriter.replace(site, fmt, fmt.round(graph.linear_weight(node)) | own)

        walk_through(
            Walk(graph, windows, ctx.target),
            by_activation(plan.sites),
            solve,
            replace,
            FinishedGroups(ctx.workspace, "scales"),
            lambda text, part=None: ctx.progress(f"{self.name}: {text}", part=part),
        )
        rewriter.finish()
        stats = weight_stats(before, graph) | {"calibration_tokens": sum(map(len, windows))}
        return PassResult(len(plan.sites), stats)


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [N, K] as (float8_e4m3fn [N, K], scale [N, 1] float32), absmax / 448 of each row."""
    smallest = torch.finfo(torch.float32).tiny
    scale = (weight.to(torch.float32).abs().amax(dim=1, keepdim=True) / FP8_MOST).clamp_min(smallest)
    return (weight / scale).clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn), scale


def static_scale(absmax: Tensor) -> Tensor:
    """The scale [1] of activations up to ``absmax``."""
    return (absmax.reshape(1) / FP8_MOST).clamp_min(torch.finfo(torch.float32).tiny)
