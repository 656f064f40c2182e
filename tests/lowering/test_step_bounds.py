"""Bounds of a step against numbers counted by hand."""

from __future__ import annotations

import pytest

from optkit.graph.shapes import Point
from optkit.lowering.step_bounds import activation_bytes, floor_seconds
from optkit.machine.target import Target
from tests.support.sample_artifact import ROWS, small_graph

TOKENS = 32


def machine(flops: float, bandwidth: float) -> Target:
    return Target("cpu", "cpu", (), 1, 1 << 30, flops, 0.0, 0.0, 0.0, bandwidth, "measured")


def test_the_floor_is_the_larger_of_arithmetic_and_memory() -> None:
    """An output head of 8 x 8 for one row; pointwise work of a number each besides."""
    graph, point = small_graph(), Point(TOKENS, 1, TOKENS)
    weights = 4.0 * ROWS * ROWS  # of the head: the embedding reads rows, no matrix
    assert floor_seconds(graph, point, machine(1e18, 1.0)) == pytest.approx(weights)
    slow = floor_seconds(graph, point, machine(1.0, 1e18))
    assert 2.0 * ROWS * ROWS <= slow <= 2.0 * ROWS * ROWS + 2 * TOKENS * ROWS


def test_activations_alive_at_once_are_the_widest_neighbours() -> None:
    """The embedded rows [32, 8] and the chosen row [1, 8] live together; the logits follow when the rows are gone."""
    assert activation_bytes(small_graph(), Point(TOKENS, 1, TOKENS)) == 4 * ROWS * (TOKENS + 1)
