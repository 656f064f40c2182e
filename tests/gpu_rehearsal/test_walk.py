"""A walk over calibration text on a GPU: computed there, and on the host again for the passes."""

from __future__ import annotations

import pytest
import torch

from optkit import kernels
from optkit.calibration.walk import Walk
from optkit.kernels import reference
from optkit.machine.target import get_target
from tests.gpu_rehearsal.machine import rehearsal
from tests.support.graphs import captured

WINDOWS = [[5, 9, 2, 7, 1, 4], [3, 8, 6]]


def test_a_walk_on_a_gpu_gives_what_one_on_the_host_does(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured("llama")
    goals = [node.args[0] for node in graph.calls(reference.linear)]
    plain = Walk(graph.clone(), WINDOWS, None)
    names = {node.name: node for node in plain.graph.fx.nodes}
    expected = [list(plain.values(names[goal.name])) for goal in goals]
    monkeypatch.setattr(kernels, "table", lambda kind="cpu": ())  # the interpreter would take minutes
    with rehearsal() as (machine, _):
        walk = Walk(graph, WINDOWS, get_target("cuda-h200"))
        for goal, right in zip(goals, expected, strict=True):
            for value, exact in zip(walk.values(goal), right, strict=True):
                torch.testing.assert_close(value, exact, atol=1e-5, rtol=1e-4)
            assert all(held.device.type == "cuda" for values in walk.live for held in values.values())
        assert machine.peak > 0 and all(t.device.type == "cpu" for t in walk.state().values())
    assert all(weight.value.device.type == "cpu" for weight in graph.weights.values())
