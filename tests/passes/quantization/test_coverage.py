"""Rows of experts of a walk, against the rows of a whole run; tokens below the limit are named."""

from __future__ import annotations

import torch

from optkit.calibration.walk import Walk
from optkit.graph import ops
from optkit.kernels import reference
from optkit.passes.quantization.coverage import Coverage, RowsOfExperts
from tests.support.graphs import captured, dense
from tests.support.target import TARGET


def test_rows_are_those_that_the_router_sends_to_the_expert() -> None:
    """Both projections: activations shared by the experts of a token, and activations of each expert."""
    graph = captured("qwen3_moe", num_hidden_layers=1)
    windows = [list(range(3, 20)), list(range(40, 52))]
    walk = Walk(graph, windows, TARGET)
    for node in graph.calls(reference.expert_linear):
        x, experts = ops.activation(node), ops.argument(node, "experts")
        rows = RowsOfExperts(walk, x, experts, 4)
        assert rows.tokens.sum() == 2 * sum(map(len, windows))
        for expert in range(4):
            found = torch.cat(list(rows.of(expert)))
            assert len(found) == rows.tokens[expert]
            expected = []
            for window in windows:
                part = graph.clone()
                by_name = {n.name: n for n in part.fx.nodes}
                part.fx.output_node().args = ((by_name[x.name], by_name[experts.name]),)
                part.prune()
                values, chosen = dense(part, torch.tensor(window))
                mine = chosen == expert
                expected.append(values[mine] if values.ndim == 3 else values[mine.any(dim=1)])
            torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_experts_below_the_limit_are_named() -> None:
    coverage = Coverage(10)
    assert coverage.stats() == {}
    coverage.add("a", torch.tensor([10, 9, 0]))
    coverage.add("b", torch.tensor([50, 60, 70]))
    stats = coverage.stats()
    assert stats["rounded_experts"] == {"a": {"1": 9, "2": 0}}
    assert stats["expert_tokens"]["b"] == [50, 60, 70] and stats["expert_tokens_needed"] == 10
