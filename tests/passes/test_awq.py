"""awq on graphs: the error, and the float model behind the folded scales."""

from __future__ import annotations

import pytest
import torch

from optkit.graph.verify import verify
from tests.support.correlated import correlated, error, quantized
from tests.support.graphs import (
    assert_origins_invert,
)


@pytest.mark.parametrize("scheme", ["W4A8", "W4A16_ASYM"])
def test_awq_is_closer_than_rounding_to_nearest(scheme: str) -> None:
    plain, better = (quantized("llama", r, scheme=scheme, group_size=32) for r in ("rtn", "awq"))
    verify(better)
    assert_origins_invert(better)
    assert error(better, "llama") < 0.95 * error(plain, "llama")


@pytest.mark.parametrize("name", ["gemma2", "phi"])
def test_awq_keeps_origins_on_other_architectures(name: str) -> None:
    graph = quantized(name, "awq", scheme="W4A16", group_size=32)
    verify(graph)
    assert_origins_invert(graph)
    assert 0 < error(graph, name) < 1


def test_awq_folds_scales_without_a_change_of_the_float_model() -> None:
    """Scales are folded: with 8 bits, where rounding is small, the logits are the float model's."""
    graph = quantized("llama", "awq", scheme="W8A16", group_size=32, clip=False)
    assert error(graph, "llama") < 0.01
    norm = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(graph.weights[norm].value, correlated("llama").weights[norm].value)
