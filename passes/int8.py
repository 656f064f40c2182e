"""int8: linear layers in W8A8, per-channel weights and dynamic per-token activations.

Each weight row and each activation row gets its own symmetric scale, ``absmax / 127``; products accumulate
exactly in int32 and are scaled back once (the scheme of LLM.int8(), arXiv 2208.07339, without outlier columns,
and of ZeroQuant, arXiv 2206.01861). With ``group_size`` every run of so many channels has scales of its own,
which keeps one outlier channel from costing the whole row its resolution. Compute-bound prefill gains from the
int8 units, memory-bound decode from weights of a quarter the size.

On disk the weights are compressed-tensors ``int-quantized``: ``weight`` int8 and ``weight_scale`` [N, G].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, fx

from optkit.kernels import reference, select
from optkit.passes.base import PassContext
from optkit.passes.linear_quantization import LinearQuantization, LinearQuantizationConfig


class Int8Config(LinearQuantizationConfig):
    group_size: Literal[0, 32, 64, 128] = Field(
        0, description="channels that share a scale; 0 is one scale a token and output channel"
    )


class Int8(LinearQuantization):
    name = "int8"
    format = "int8"
    Config = Int8Config

    @property
    def activation_group_size(self) -> int:
        return self.config.group_size

    def kernel_lacks(self, weight: Tensor, ctx: PassContext) -> str | None:
        group = self.config.group_size or weight.shape[1]
        if weight.shape[1] % group:
            return f"its {weight.shape[1]} input channels are not a multiple of the group size {group}"
        scales = torch.empty(weight.shape[0], weight.shape[1] // group, device="meta")
        int8 = torch.empty(weight.shape, dtype=torch.int8, device="meta")
        if select("linear_w8a8", ctx.target, weights={2: int8, 3: scales}) is None:
            groups = f" with groups of {group}" if self.config.group_size else ""
            return f"no int8 kernel{groups} on {ctx.target.name} (optkit doctor says what is missing)"
        return None

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        q, scale = quantize_weight(weight, self.config.group_size)
        return {"weight": q, "weight_scale": scale}

    def call(self, q: fx.Node, scale: fx.Node, weights: Mapping[str, fx.Node], *bias: Any) -> tuple[Any, Any]:
        return reference.linear_w8a8, (q, scale, weights["weight"], weights["weight_scale"], *bias)


def quantize_weight(weight: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per row and group: weight [N, K] float gives (int8 [N, K], scale [N, G] float32).

    G is K / group_size, or 1 when ``group_size`` is 0.
    """
    groups = weight.unflatten(1, (-1, group_size or weight.shape[1])).to(torch.float32)  # [N, G, g]
    scale = groups.abs().amax(dim=2, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127.0
    q = torch.round(groups / scale).clamp_(-127, 127).to(torch.int8)
    return q.reshape(weight.shape), scale[..., 0].contiguous()
