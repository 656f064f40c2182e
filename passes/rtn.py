"""rtn: linear layers on integer grids, every weight rounded to the nearest level.

The pass needs no calibration and takes seconds instead of minutes. ``gptq`` and ``awq`` are compared with ``rtn``. At 8
bits ``rtn`` is good enough.
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
