"""Sensitivity of a layer: the divergence of whole runs in float64, though only the rest of the graph is run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optkit.calibration.walk import Walk
from optkit.graph.ir import Graph
from optkit.passes.quantization.sensitivity import Divergence, site_sensitivity
from tests.support.graphs import captured, dense, random_ids

WINDOWS = random_ids((24, 9, 17))
SITES = ("layers.0.self_attn.q_proj", "layers.0.mlp.down_proj", "layers.1.mlp.up_proj")


def walk(graph: Graph) -> Walk:
    return Walk(graph, [ids.tolist() for ids in WINDOWS], None)


def rounded(graph: Graph, site: str) -> Graph:
    """``graph`` with the weight of ``site`` in steps of an eighth."""
    variant = graph.clone()
    weight = variant.weights[f"model.{site}.weight"]
    weight.value = (weight.value * 8).round() / 8
    return variant


def whole_divergence(graph: Graph, variant: Graph, windows: list[Tensor]) -> float:
    """Mean KL(graph || variant) in nats, in float64, of every second position."""
    rows = []
    for ids in windows:
        p, q = (torch.log_softmax(dense(g, ids)[1::2].double(), -1) for g in (graph, variant))
        rows.append((p.exp() * (p - q)).sum(-1))
    return float(torch.cat(rows).mean())


def test_sensitivity_of_each_site_is_the_divergence_of_whole_runs() -> None:
    graph = captured("llama")
    inputs = {str(n.args[1].target): n.args[0].name for n in graph.linears()}
    variants = [(site, inputs[f"model.{site}.weight"], rounded(graph, site)) for site in SITES]
    found = dict(site_sensitivity(graph, variants, walk(graph)))
    assert tuple(found) == SITES
    for site, _, variant in variants:
        expected = whole_divergence(graph, variant, WINDOWS)
        assert expected > 1e-6 and found[site] == pytest.approx(expected, rel=2e-2), site


def test_divergence_reads_whole_windows_of_at_least_the_given_tokens() -> None:
    graph = captured("llama")
    variant = rounded(graph, SITES[0])
    divergence = Divergence(graph, walk(graph), tokens=25)
    assert [len(logits) for logits in divergence.expected] == [12, 4]
    expected = whole_divergence(graph, variant, WINDOWS[:2])
    assert divergence.of(variant) == pytest.approx(expected, rel=2e-2)
    assert divergence.of(graph) == pytest.approx(0.0, abs=1e-9)
