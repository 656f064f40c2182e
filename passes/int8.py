"""int8: linear layers in W8A8 (or W8A16), per-channel weights and dynamic per-token activations.

Each weight row and each activation row gets a symmetric scale, ``absmax / 127``; products accumulate exactly in int32
and are scaled back once (the scheme of LLM.int8(), arXiv 2208.07339, without outlier columns, and of ZeroQuant, arXiv
2206.01861). With ``group_size`` every run of ``group_size`` channels has a scale, so an outlier channel costs
resolution only in the channel's own group. Compute-bound prefill gains from the int8 units, memory-bound decode from
weights of a quarter the size. Layers on the ``weight_only`` list keep float activations (W8A16): right for the output
head, since the head has few rows to multiply, and no later layer makes up for the head's errors.

On disk the weights are compressed-tensors ``int-quantized``: ``weight`` int8 and ``weight_scale`` [N, G].
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator
from torch import fx

from optkit.graph.ir import Graph
from optkit.passes.quantization.formats import Int8Format
from optkit.passes.quantization.linear import LinearQuantization, LinearQuantizationConfig
from optkit.passes.quantization.targets import listed


class Int8Config(LinearQuantizationConfig):
    group_size: Literal[0, 32, 64, 96, 128, 192] = Field(
        0, description="channels that share a scale; 0 is one scale a token and output channel"
    )
    weight_only: list[str] = Field(
        default_factory=list,
        description="modules whose activations stay as they are (W8A16): names as in ignore",
    )

    @field_validator("weight_only")
    @classmethod
    def weight_only_compiles(cls, patterns: list[str]) -> list[str]:
        return cls.patterns_compile(patterns)


class Int8(LinearQuantization):
    name = "int8"
    Config = Int8Config

    def format_for(self, graph: Graph, node: fx.Node, name: str) -> Int8Format:
        weight_only = listed(self.config.weight_only, graph, node, name)
        return Int8Format(self.config.group_size, weight_only)
