"""rtn: linear layers on integer grids, every weight to the nearest level.

No calibration, seconds instead of minutes; what ``gptq`` and ``awq`` are measured against, and good enough at 8 bits.
"""

from __future__ import annotations

from torch import fx

from optkit.graph.ir import Graph
from optkit.passes.linear_quantization import LinearQuantization
from optkit.passes.schemes import SchemeConfig
from optkit.passes.weight_formats import WeightFormat


class RTN(LinearQuantization):
    name = "rtn"
    Config = SchemeConfig

    def format_for(self, graph: Graph, node: fx.Node, name: str) -> WeightFormat | str:
        return self.config.format_for(graph, node)
