"""rtn: linear layers on integer grids, every weight rounded to the nearest level.

The pass needs no calibration and takes seconds instead of minutes. ``gptq`` and ``awq`` are compared with ``rtn``. At 8
bits ``rtn`` is good enough.
"""

from __future__ import annotations

from torch import fx

from optkit.graph.ir import Graph
from optkit.passes.quantization.formats import WeightFormat
from optkit.passes.quantization.linear import LinearQuantization
from optkit.passes.quantization.overrides import LayerOverrides
from optkit.passes.quantization.schemes import SCHEME_OPTIONS, SchemeConfig


class RTNConfig(LayerOverrides, SchemeConfig):
    overridable = SCHEME_OPTIONS


class RTN(LinearQuantization):
    name = "rtn"
    Config = RTNConfig

    def format_for(self, graph: Graph, node: fx.Node, name: str) -> WeightFormat | str:
        config = self.config_for(graph, node)
        return config if isinstance(config, str) else config.format_for(graph, node)
