"""A tiny model with a few large channels in its activations, as trained models have, and its error when quantized."""

from __future__ import annotations

import functools
from typing import Any

import torch

from optkit.graph.ir import Graph
from optkit.passes import load
from tests.support.graphs import CONTEXT, apply, captured, dense, random_ids
from tests.support.target import TARGET

TEXT = {"samples": 32, "length": 32}
FUSIONS = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm")


@functools.cache
def correlated(name: str) -> Graph:
    """A tiny model whose activations have a few large channels, as those of trained models do."""
    graph = captured(name)
    generator = torch.Generator().manual_seed(3)
    for row, weight in graph.weights.items():
        if "layernorm" in row and weight.value.ndim == 1:
            weight.value = weight.value * torch.rand(len(weight.value), generator=generator).mul(3).exp()
    return graph


def quantized(name: str, row: str, fuse: bool = True, **options: Any) -> Graph:
    graph = correlated(name).clone()
    for fusion in FUSIONS if fuse else ():
        apply(graph, fusion)
    options |= {} if row == "rtn" else {"calibration": TEXT}
    pass_class = load(row)
    optimization = pass_class(pass_class.Config.model_validate(options))
    plan = optimization.check(graph, CONTEXT)
    assert optimization.apply(graph, plan, CONTEXT).changed == len(plan.sites) > 0
    return graph


def error(graph: Graph, name: str) -> float:
    """Squared error of the logits on other text than that calibrated on, over that of the float model's."""
    total = norm = 0.0
    for ids in random_ids((40, 37, 51)):
        expected = dense(correlated(name), ids)
        total += float((dense(graph, ids, TARGET) - expected).pow(2).sum())
        norm += float(expected.pow(2).sum())
    return total / norm
