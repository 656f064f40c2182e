"""The number of the layer that is being traced: of the module, or of the call where a module serves several layers."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from optkit.capture.layer_numbers import current_layers, layer_number, numbered
from optkit.errors import UnsupportedModel


class Layer(nn.Module):
    """Notes the number of the layer, before and after a call of the module inside."""

    def __init__(self, layer_idx: int | None, inside: nn.Module | None = None) -> None:
        super().__init__()
        self.layer_idx, self.inside = layer_idx, inside
        self.seen: list[int] = []

    def forward(self, **options: Any) -> None:
        self.seen.append(layer_number("a layer"))
        if self.inside is not None:
            self.inside(layer_idx=7)
            self.seen.append(layer_number("a layer"))


def test_innermost_module_gives_the_number() -> None:
    inside = Layer(2)
    outside = Layer(1, inside)
    with numbered(outside):
        outside()
    assert outside.seen == [1, 1] and inside.seen == [2]


def test_module_of_several_layers_has_the_number_of_the_call() -> None:
    shared = Layer(-1)
    first, second = Layer(0, shared), Layer(3)
    model = nn.ModuleList([first, second])
    with numbered(model):
        first()
        shared(layer_idx=3)
    assert shared.seen == [7, 3]


def test_module_without_a_number_is_refused_and_nothing_is_left_behind() -> None:
    model = nn.ModuleList([Layer(None), Layer(4, Layer(None))])
    with numbered(model), pytest.raises(UnsupportedModel, match="a layer has no layer number"):
        model[0]()
    with pytest.raises(RuntimeError, match="inside"), numbered(model):
        model[1]()
        raise RuntimeError("inside")
    assert not current_layers and not model[1]._forward_pre_hooks
