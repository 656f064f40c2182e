"""rtn: linear layers on integer grids, every weight to the nearest level.

No calibration, seconds instead of minutes; what ``gptq`` and ``awq`` are measured against, and good enough at 8 bits.
"""

from __future__ import annotations

from torch import fx

from optkit.graph.ir import Graph
from optkit.passes.quantization.formats import WeightFormat
from optkit.passes.quantization.linear import LinearQuantization
from optkit.passes.quantization.schemes import SchemeConfig


class RTN(LinearQuantization):
    name = "rtn"
    Config = SchemeConfig

    def format_for(self, graph: Graph, node: fx.Node, name: str) -> WeightFormat | str:
        return self.config.format_for(graph, node)
