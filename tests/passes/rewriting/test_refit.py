"""Refitting: the closed form beside float64 least squares, and what a cut model regains."""

from __future__ import annotations

import torch

from optkit.calibration.walk import Walk
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.passes.rewriting.refit import Refit, Sums, ridge, stream_before
from tests.support.graphs import apply, captured, random_ids

WINDOWS = [ids.tolist() for ids in random_ids((40, 23, 31))]


def test_ridge_is_least_squares_with_a_penalty() -> None:
    generator = torch.Generator().manual_seed(3)
    x, targets, weight = (torch.randn(*shape, generator=generator) for shape in ((50, 12), (50, 7), (7, 12)))
    damping = 0.3
    penalty = (damping * (x.T @ x).diagonal().mean()).sqrt()
    stacked = torch.cat([x, penalty * torch.eye(12)]).double()
    wanted = torch.cat([targets, penalty * weight.T]).double()
    expected = torch.linalg.lstsq(stacked, wanted).solution.T
    found = ridge(x.T @ x, targets.T @ x, weight, damping)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ridge(x.T @ x, targets.T @ x, weight, 1e9), weight, atol=1e-5, rtol=1e-5)


def downs(graph: Graph) -> list[torch.fx.Node]:
    return [node for node in graph.calls(reference.linear) if "down_proj" in str(node.args[1])]


def everything(sums: Sums, weight: torch.Tensor) -> torch.Tensor:
    return torch.arange(weight.shape[1])


def test_a_model_that_is_not_cut_stays_as_it_is() -> None:
    graph = captured("llama")
    refit, walk = Refit(graph, WINDOWS, None, 0.1), Walk(graph, WINDOWS, None)
    for down in downs(graph):
        kept, weight = refit.solve(walk, down, everything)
        assert kept.tolist() == list(range(96))
        torch.testing.assert_close(weight, graph.linear_weight(down), atol=1e-5, rtol=1e-4)


def test_sums_are_of_weighted_tokens() -> None:
    """The sums, written out for one layer from the model's own activations."""
    graph = captured("llama")
    down = downs(graph)[0]
    before = stream_before(down)
    assert before is not None
    weight, walk = graph.linear_weight(down), Walk(graph, WINDOWS, None)
    found = Refit(graph, WINDOWS, None, 0.1).sums(walk, down, weight)
    again = Walk(graph.clone(), WINDOWS, None)
    names = {node.name: node for node in again.graph.fx.nodes}
    stream = torch.cat(list(again.values(names[before.name]))).double()
    x = torch.cat(list(again.values(names[down.args[0].name]))).double()
    scale = 1 / (stream + x @ weight.double().T).square().mean(1, keepdim=True).sqrt()
    torch.testing.assert_close(found.gram.double(), (x * scale).T @ (x * scale), atol=1e-4, rtol=1e-4)
    expected = (x @ weight.double().T * scale).T @ (x * scale)
    torch.testing.assert_close(found.cross.double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.size.double(), x.abs().mean(0), atol=1e-5, rtol=1e-4)


def test_the_stream_is_found_before_and_after_fusion() -> None:
    graph = captured("llama")
    plain = [stream_before(node) for node in downs(graph)]
    apply(graph, "fuse_add_rms_norm")
    fused = [stream_before(node) for node in downs(graph)]
    assert all(node is not None for node in (*plain, *fused))
    normed = captured("gemma2")  # a norm reads the result before it is added
    assert all(stream_before(node) is None for node in downs(normed))
