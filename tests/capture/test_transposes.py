"""Values computed on columns are computed on rows, with the same numbers, and other transposes stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from optkit.kernels import reference
from tests.capture.test_canonicalize import raised, rows


def gate_of_columns(linear: nn.Module, x: Tensor) -> Tensor:
    """LFM2's layer: parts of the columns are multiplied, and the product goes back to rows."""
    b, c, y = linear(x).transpose(-1, -2).split(8, dim=-2)
    return (c * (b * y)).transpose(-1, -2)


def steps_of_columns(steps: nn.Module, x: Tensor) -> Tensor:
    """Mamba's time steps: a weight times columns, in a batch of one."""
    columns = steps.weight @ x.transpose(0, 1)[None]
    return nn.functional.softplus(columns[0].transpose(0, 1) + steps.bias)


def test_parts_and_products_of_columns_are_computed_on_rows() -> None:
    _, ops = raised(gate_of_columns, nn.Linear(8, 24), x=rows())
    assert sorted(ops) == [
        "aten.mul.Tensor",
        "aten.mul.Tensor",
        "aten.split.Tensor",
        *["getitem"] * 3,
        "linear",
    ]


def test_weight_times_columns_is_a_linear_layer_of_rows() -> None:
    graph, ops = raised(steps_of_columns, nn.Linear(8, 5), x=rows())
    assert ops == ["linear", "softplus"]
    (node,) = graph.calls(reference.softplus)
    assert str(node.args[1].target) == "of.0.bias"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.transpose(0, 1).split(4, dim=0)[0] + x[:4, :1]).transpose(0, 1),
        lambda x: x.transpose(0, 1).cumsum(1).transpose(0, 1),
        lambda x: x.transpose(0, 1).split(4, dim=1)[0].transpose(0, 1),
    ],
    ids=["with another operand", "over tokens", "parts of the tokens"],
)
def test_what_is_not_of_columns_alone_keeps_its_transposes(function: Callable[[Tensor], Tensor]) -> None:
    _, ops = raised(function, x=rows())
    assert ops.count("aten.transpose.int") == 2


def test_columns_read_twice_are_not_computed_twice() -> None:
    def both(x: Tensor) -> Tensor:
        columns = x.transpose(0, 1) * x.transpose(0, 1)
        return columns.transpose(0, 1).sum() + columns.cumsum(0).sum()

    _, ops = raised(both, x=rows())
    assert ops.count("aten.mul.Tensor") == 1
