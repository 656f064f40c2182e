"""int8: linear layers in W8A8 (or W8A16), per-channel weights and dynamic per-token activations.

Each weight row and each activation row gets its own symmetric scale, ``absmax / 127``; products accumulate
exactly in int32 and are scaled back once (the scheme of LLM.int8(), arXiv 2208.07339, without outlier columns,
and of ZeroQuant, arXiv 2206.01861). With ``group_size`` every run of so many channels has scales of its own,
which keeps one outlier channel from costing the whole row its resolution. Compute-bound prefill gains from the
int8 units, memory-bound decode from weights of a quarter the size. Layers on the ``weight_only`` list keep their
activations (W8A16): right for the output head, whose few rows cost nothing and whose errors nothing after it forgives.

On disk the weights are compressed-tensors ``int-quantized``: ``weight`` int8 and ``weight_scale`` [N, G].
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, fx

from optkit.graph.ir import Graph
from optkit.graph.ops import op_name
from optkit.kernels import reference, select
from optkit.passes.base import PassContext
from optkit.passes.linear_quantization import (
    WEIGHT_ONLY,
    LinearQuantization,
    LinearQuantizationConfig,
    listed,
)


class Int8Config(LinearQuantizationConfig):
    group_size: Literal[0, 32, 64, 128] = Field(
        0, description="channels that share a scale; 0 is one scale a token and output channel"
    )
    weight_only: list[str] = Field(
        default_factory=list,
        description="modules whose activations stay as they are (W8A16): names as in ignore",
    )


class Int8(LinearQuantization):
    name = "int8"
    format = "int8"
    tensors = ("weight", "weight_scale")
    Config = Int8Config

    @property
    def activation_group_size(self) -> int:
        return self.config.group_size

    def op_for(self, graph: Graph, node: fx.Node, name: str) -> Any:
        weight_only = listed(self.config.weight_only, graph, node, name)
        return reference.linear_w8a16 if weight_only else reference.linear_w8a8

    def kernel_lacks(self, weight: Tensor, op: Any, ctx: PassContext) -> str | None:
        group = self.config.group_size or weight.shape[1]
        if weight.shape[1] % group:
            return f"its {weight.shape[1]} input channels are not a multiple of the group size {group}"
        scales = torch.empty(weight.shape[0], weight.shape[1] // group, device="meta")
        int8 = torch.empty(weight.shape, dtype=torch.int8, device="meta")
        position = 1 if op in WEIGHT_ONLY else 2
        if select(str(op_name(op)), ctx.target, weights={position: int8, position + 1: scales}) is None:
            groups = f" with groups of {group}" if self.config.group_size else ""
            return f"no int8 kernel{groups} on {ctx.target.name} (optkit doctor says what is missing)"
        return None

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        q, scale = quantize_weight(weight, self.config.group_size)
        return {"weight": q, "weight_scale": scale}


def quantize_weight(weight: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per row and group: weight [N, K] float gives (int8 [N, K], scale [N, G] float32).

    G is K / group_size, or 1 when ``group_size`` is 0.
    """
    groups = weight.unflatten(1, (-1, group_size or weight.shape[1])).to(torch.float32)  # [N, G, g]
    scale = groups.abs().amax(dim=2, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127.0
    q = torch.round(groups / scale).clamp_(-127, 127).to(torch.int8)
    return q.reshape(weight.shape), scale[..., 0].contiguous()
