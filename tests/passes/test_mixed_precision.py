"""mixed_precision on graphs: budgets kept and used, bits for sensitive layers, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.passes import load
from tests.support.correlated import FUSIONS, TEXT, correlated, error
from tests.support.graphs import (
    CONTEXT,
    apply,
)


def mixed(**options: Any) -> tuple[Graph, dict[str, Any]]:
    graph = correlated("llama").clone()
    for fusion in FUSIONS:
        apply(graph, fusion)
    pass_class = load("mixed_precision")
    options = {"schemes": ["W4A8:32", "W8A8:32"], "sensitivity_tokens": 64, "calibration": TEXT} | options
    optimization = pass_class(pass_class.Config.model_validate(options))
    plan = optimization.check(graph, CONTEXT)
    return graph, optimization.apply(graph, plan, CONTEXT).stats


def test_mixed_precision_keeps_and_uses_a_budget_of_bits() -> None:
    graph, stats = mixed(bits=6.5)
    verify(graph)
    assert 5.0 < stats["bits_per_weight"] <= 6.5
    assert stats["assigned"]["W4A8:32"] > 0 and stats["assigned"]["W8A8:32"] > 0
    small, _ = mixed(bits=4.6)
    assert error(graph, "llama") < error(small, "llama")
    assert len(list(graph.calls(reference.linear_w8a8))) == stats["assigned"]["W8A8:32"]


def test_mixed_precision_upgrades_the_most_sensitive_layers() -> None:
    _, stats = mixed(bits=6.5)
    worst = [name for name, _ in stats["most_sensitive"]]
    assert set(stats["upgraded"]) & set(worst[:3])


def test_mixed_precision_upgrades_layers_for_a_tighter_divergence() -> None:
    _, stats = mixed(max_kld=1e9)
    assert stats["assigned"] == {"W4A8:32": 8, "W8A8:32": 0}
    _, tight = mixed(max_kld=stats["expected_kld"] / 2)
    assert tight["assigned"]["W8A8:32"] > 0


def test_mixed_precision_keeps_the_budget_with_milliseconds_as_the_price() -> None:
    graph, stats = mixed(bits=6.5, price="milliseconds")
    verify(graph)
    assert stats["bits_per_weight"] <= 6.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one of bits"),
        ({"bits": 5.0, "max_kld": 0.1}, "give one of bits"),
        ({"bits": 5.0, "schemes": ["W4A8", "W9A9"]}, "there is no scheme"),
        ({"bits": 5.0, "schemes": ["W4A8:x", "W8A8"]}, "is not a scheme"),
    ],
)
def test_mixed_precision_refuses_contradictory_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("mixed_precision").Config.model_validate(options)


def test_mixed_precision_refuses_a_budget_below_the_smallest_formats() -> None:
    with pytest.raises(UserError, match="smallest"):
        mixed(bits=3.0)
