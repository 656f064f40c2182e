"""drop_layers: removes the decoder layers with the least influence on the hidden states.

The influence of a layer is ``1 - cos(h, h')``, h and h' the hidden states of a token at the layer's input and output,
the mean over calibration text (block influence of ShortGPT, arXiv 2403.03853). The result is a shallower model:
faster by every kernel, with a smaller KV cache. Each removed layer costs more quality than a cut of a few channels
everywhere (``prune_ffn``), so the pass is held to the same bounds as a quantizer; ``prune_ffn`` with ``refit`` may
follow.

config.json has the number of layers, and checkpoint tensors have the layer's number in their names, so the layers
that are left are numbered anew. Only models of equal layers are cut (``passes/rewriting/layers.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from pydantic import Field
from torch import Tensor

from optkit.calibration.samples import Calibration
from optkit.calibration.walk import Walk
from optkit.graph.ir import Graph
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit.passes.rewriting.layers import Entry, entries, without

LAYERS = "num_hidden_layers"  # in config.json


class DropLayersConfig(Config):
    count: int = Field(1, ge=1, le=1024, description="decoder layers to remove")
    calibration: Calibration = Field(
        default_factory=lambda: Calibration(samples=16), description="the text that influence is measured on"
    )


class DropLayers(Pass):
    name = "drop_layers"
    stage = Stage.TRANSFORM
    exact = False
    Config = DropLayersConfig

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        """Find the stack of layers, the only site; its nodes are the norms at which the layers begin."""
        plan, found = Plan(), entries(graph)
        if isinstance(found, str):
            plan.skips.append(Skip("decoder layers", found))
        elif not names_layers(graph.meta.model_type):
            what = f"the config of a {graph.meta.model_type} model has no {LAYERS}"
            plan.skips.append(Skip("decoder layers", what))
        elif len(found) <= self.config.count:
            what = f"there are {len(found)}, and the last stays"
            plan.skips.append(Skip("decoder layers", what))
        else:
            plan.sites.append(Site("decoder layers", tuple(entry.norm for entry in found)))
        return plan

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        before, found = graph.num_bytes(), entries(graph)
        if isinstance(found, str):
            raise ValueError(f"check found layers, and apply none: {found}")
        influence = self.influence(graph, found, ctx)
        order = sorted(range(len(influence)), key=influence.__getitem__)
        removed = set(order[: self.config.count])
        without(graph, found, removed)
        graph.annotations["config"] = {
            **graph.annotations.get("config", {}),
            LAYERS: len(found) - len(removed),
        }
        stats = {"layers_before": len(found), "layers_after": len(found) - len(removed)}
        bytes_ = {"weight_bytes_before": before, "weight_bytes_after": graph.num_bytes()}
        removal = {"removed": sorted(removed), "influence": [round(value, 6) for value in influence]}
        return PassResult(1, stats | bytes_ | removal)

    def influence(self, graph: Graph, found: Sequence[Entry], ctx: PassContext) -> list[float]:
        """The influence of each layer of ``found`` but the last. A dry run, without values, takes layers in order."""
        if graph.is_meta:
            return [0.0] * (len(found) - 1)
        walk = Walk(graph, ctx.calibration_windows(self.config.calibration), ctx.target)
        before, influence = list(walk.values(found[0].stream)), []
        for entry in found[1:]:
            ctx.progress(f"{self.name}: layer {entry.number - 1}", part=(entry.number, len(found)))
            after = list(walk.values(entry.stream))
            influence.append(block_influence(zip(before, after, strict=True)))
            before = after
        return influence


def block_influence(states: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The mean of ``1 - cos`` over the rows of pairs of hidden states [T, hidden], a pair for each window."""
    found = [1 - torch.cosine_similarity(x.double(), y.double(), dim=-1) for x, y in states]
    return float(torch.cat(found).mean())


@cache
def names_layers(model_type: str) -> bool:
    """True where transformers' config of the architecture calls the number of layers ``num_hidden_layers``."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING and LAYERS in CONFIG_MAPPING[model_type]().to_dict()
