"""rtn on graphs: each weight becomes the nearest level of its grid, computed here in float64."""

from __future__ import annotations

import pytest
import torch

from optkit.checkpoint.modules import modules
from optkit.graph.verify import verify
from tests.support.graphs import apply, assert_origins_invert, captured


@pytest.mark.parametrize("scheme", ["W4A16", "W8A16"])
def test_rtn_rounds_each_weight_to_the_nearest_level_of_its_scale(scheme: str) -> None:
    graph = captured("llama")
    before = {name: weight.value for name, weight in graph.weights.items()}
    apply(graph, "rtn", scheme=scheme, group_size=32)
    verify(graph)
    assert_origins_invert(graph)
    found = list(modules(graph))
    assert len(found) == 2 * 7
    for module in found:
        weight = before[f"{module.name}.weight"].double().unflatten(1, (-1, 32))
        scale = module.operands["weight_scale"].double()[..., None]
        low, high = -(2 ** (module.bits - 1)), 2 ** (module.bits - 1) - 1
        expected = (weight / scale).round().clamp(low, high) * scale
        torch.testing.assert_close(module.float_weight().double(), expected.flatten(1), atol=1e-6, rtol=1e-6)
