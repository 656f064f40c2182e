"""Statistics of activations: run a graph on calibration text and look at what flows into chosen nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from optkit.graph.dense import dense_inputs
from optkit.graph.ir import Graph
from optkit.graph.lower import lower

if TYPE_CHECKING:
    from optkit.target import Target

AMAX = torch.ops.aten.amax.default
ABS = torch.ops.aten.abs.default


def channel_absmax(
    graph: Graph, nodes: Sequence[fx.Node], windows: Sequence[Sequence[int]], target: Target
) -> dict[str, Tensor]:
    """Largest magnitude of each channel of each node's value over ``windows``: node name to [K].

    The graph is run with taps in place of its output, one window at a time, so that memory holds one window's
    activations.
    """
    tapped = graph.clone()
    by_name = {node.name: node for node in tapped.fx.nodes}
    output = next(node for node in tapped.fx.nodes if node.op == "output")
    taps = []
    with tapped.fx.inserting_before(output):
        for node in nodes:
            magnitude = tapped.fx.call_function(ABS, (by_name[node.name],))
            taps.append(tapped.fx.call_function(AMAX, (magnitude, [0])))
    output.args = (tuple(taps),)
    tapped.prune()
    model = lower(tapped, target)
    found: list[Tensor] = []
    for window in windows:
        values = model(dense_inputs([len(window)], torch.tensor(window), graph.meta.kv_specs))
        found = [torch.maximum(a, b) for a, b in zip(found, values, strict=True)] if found else list(values)
    return {node.name: value for node, value in zip(nodes, found, strict=True)}
