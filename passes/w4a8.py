"""w4a8: linear layers with int4 weights and dynamic int8 activations.

Every 32 or 64 input channels of a weight row share a scale, and each weight is one of 16 levels. Decode reads an
eighth of the float bytes; prefill runs on the int8 units as ``int8`` does. Symmetric levels lie around zero,
``scale * (code - 8)``, in the form of compressed-tensors ``pack-quantized``. Asymmetric ones are ``scale * code +
minimum`` with a float minimum: half a bit a weight more, no level wasted where a group is not centred, and exactly the
grid of GGUF's Q4_1.

Weights are rounded to the nearest level (``int4_grid``); scales and minimums are float16 where that costs no accuracy,
being a fifth of what a decode step reads. In the graph the codes are int32 [N, K / 8], eight to a word in the order of
compressed-tensors: rows are output channels, so a fused weight is still its parts one after another, and a tensor is
the same in the graph and on disk.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, fx

from optkit.graph.ir import Graph
from optkit.kernels import reference, select
from optkit.kernels.reference import INT4_PER_WORD, pack_int4
from optkit.passes.base import PassContext
from optkit.passes.int4_grid import quantize_int4
from optkit.passes.linear_quantization import LinearQuantization, LinearQuantizationConfig


class W4A8Config(LinearQuantizationConfig):
    group_size: Literal[32, 64] = Field(32, description="channels of a weight row that share a scale")
    symmetric: bool = Field(False, description="levels around zero instead of from a float minimum")
    activation_group_size: Literal[0, 32, 64, 128] | None = Field(
        None,
        description="channels of a token that share a scale: a multiple of group_size (the default), or 0: all",
    )

    @model_validator(mode="after")
    def activation_groups_are_whole_weight_groups(self) -> W4A8Config:
        if (self.activation_group_size or 0) % self.group_size:
            raise ValueError("activation_group_size must be 0 or a multiple of group_size")
        return self


class W4A8(LinearQuantization):
    name = "w4a8"
    format = "int4"
    tensors = ("weight_packed", "weight_scale", "weight_minimum")
    Config = W4A8Config

    @property
    def activation_group_size(self) -> int:
        own = self.config.activation_group_size
        return self.config.group_size if own is None else own

    def op_for(self, graph: Graph, node: fx.Node, name: str) -> Any:
        return reference.linear_w4a8

    def kernel_lacks(self, weight: Tensor, op: Any, ctx: PassContext) -> str | None:
        (n, k), group = weight.shape, self.config.group_size
        for size in (group, self.activation_group_size or k):
            if k % size:
                return f"its {k} input channels are not a multiple of the group size {size}"
        codes = torch.empty(n, k // INT4_PER_WORD, dtype=torch.int32, device="meta")
        scales = torch.empty(n, k // group, device="meta")
        if select("linear_w4a8", ctx.target, weights={2: codes, 3: scales}) is None:
            return f"no int4 kernel on {ctx.target.name} (optkit doctor says what is missing)"
        return None

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        result = quantize_int4(weight, self.config.group_size, self.config.symmetric)
        tensors = {"weight_packed": pack_int4(result.codes), "weight_scale": result.scale}
        if result.minimum is not None:
            tensors["weight_minimum"] = result.minimum
        return tensors
