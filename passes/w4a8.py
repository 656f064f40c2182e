"""w4a8: linear layers with int4 weights and dynamic int8 activations.

Every 32 to 192 input channels of a weight row share a scale, and each weight has one of 16 levels. Decode reads an
eighth of the float bytes; prefill runs on the int8 units like the pass ``int8``. Symmetric levels lie around zero,
``scale * (code - 8)``, in the format of compressed-tensors, ``pack-quantized``. Asymmetric levels are ``scale * code +
minimum`` with a float minimum: half a bit a weight more, no level wasted in groups off the centre, and exactly the grid
of GGUF's Q4_1.

Weights are rounded to the nearest level (``int4_grid``). Scales and minimums, a fifth of a decode step's reads, are
float16 where float16 costs no accuracy. In the graph the codes are int32 [N, K / 8], eight to a word in the order of
compressed-tensors. Rows are output channels, so a fused weight is the parts one after another, and a tensor is the
same in the graph and on disk.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from torch import fx

from optkit.graph.ir import Graph
from optkit.passes.quantization.formats import Int4Format
from optkit.passes.quantization.linear import LinearQuantization, LinearQuantizationConfig
from optkit.passes.quantization.overrides import LayerOverrides


class W4A8Config(LayerOverrides, LinearQuantizationConfig):
    overridable = ("group_size", "symmetric", "activation_group_size")

    group_size: Literal[32, 64, 96, 128, 192] = Field(
        32, description="channels of a weight row that share a scale"
    )
    symmetric: bool = Field(False, description="levels around zero instead of from a float minimum")
    activation_group_size: Literal[0, 32, 64, 96, 128, 192] | None = Field(
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
    Config = W4A8Config

    def format_for(self, graph: Graph, node: fx.Node, name: str) -> Int4Format | str:
        config = self.config_for(graph, node)
        if isinstance(config, str):
            return config
        own, group = config.activation_group_size, config.group_size
        return Int4Format(group, config.symmetric, group if own is None else own)
