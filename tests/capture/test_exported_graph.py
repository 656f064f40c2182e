"""Rewrites of exported graphs: tensors filled part by part, complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optkit.capture.complex_numbers import as_pairs
from optkit.capture.export import decompositions
from optkit.capture.exported_graph import join_filled

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


def exported(function: Callable[[Tensor], Tensor]) -> Any:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    return torch.export.export(Model(), (X,)).run_decompositions(decompositions())


def targets(program: Any) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


def filled(x: Tensor) -> Tensor:
    y = x.new_empty(2, 3, 8)
    y[..., :5].copy_(x[..., 3:])
    y[..., 5:] = x[..., :3] * 2
    return y


def test_filled_tensor_is_the_cat_of_its_parts() -> None:
    program = exported(filled)
    join_filled(program.graph)
    assert "aten.cat.default" in targets(program) and not {"aten.slice_scatter.default"} & targets(program)
    program.graph.lint()
    assert torch.equal(program.module()(X), filled(X))


def unwritten(x: Tensor) -> Tensor:
    """A sum with three tensors of which one row each is written."""
    made = torch.empty_like(x), x.new_empty(2, 3, 8), torch.empty(2, 3, 8)
    for y in made:
        y[:, 1] = x[:, 0]
    return x + made[0] + made[1] + made[2]


def test_memory_that_is_not_written_is_zero() -> None:
    program = exported(unwritten)
    assert not [name for name in targets(program) if "empty" in name]
    right = X.clone()
    right[:, 1] += 3 * X[:, 0]
    torch.testing.assert_close(program.module()(X), right)


def partly(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[..., :5] = x[..., 3:]
    return y


def test_partly_filled_tensor_stays() -> None:
    program = exported(partly)
    join_filled(program.graph)
    assert "aten.slice_scatter.default" in targets(program)
    assert torch.equal(program.module()(X), partly(X))


def rotated(x: Tensor) -> Tensor:
    angles = x[0, :, :4] * 3
    turn = torch.polar(torch.full_like(angles, 1.5), angles)
    numbers = torch.view_as_complex(x.reshape(2, 3, 4, 2))
    return torch.view_as_real(numbers * turn[None] * 0.5).flatten(2)


@pytest.mark.parametrize("function", [rotated])
def test_complex_numbers_become_pairs(function: Callable[[Tensor], Tensor]) -> None:
    program = exported(function)
    as_pairs(program.graph)
    assert not any("complex" in name or "polar" in name or "as_real" in name for name in targets(program))
    torch.testing.assert_close(program.module()(X), function(X))
