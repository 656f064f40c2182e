"""The spec of experts against products of each row with the weight of its expert."""

from __future__ import annotations

import pytest
import torch

from optkit.kernels import reference
from tests.kernels.test_reference_linear import floats


@pytest.mark.parametrize("shape", [(7, 4), (7, 2, 4)], ids=["shared rows", "a row an expert"])
def test_expert_linear_multiplies_each_row_by_the_weight_of_its_expert(shape: tuple[int, ...]) -> None:
    x, weight, bias = floats(shape, 0), floats((3 * 2, 4), 1), floats((6,), 2)
    experts = torch.tensor([[0, 2], [2, 0], [2, 2], [0, 0], [0, 2], [2, 0], [2, 2]])  # the second has no row
    found = reference.expert_linear(x, weight, bias, experts, num_experts=3)
    rows = x[:, None].expand(7, 2, 4) if x.ndim == 2 else x
    expected = torch.einsum("tjk,tjnk->tjn", rows, weight.view(3, 2, 4)[experts]) + bias.view(3, 2)[experts]
    torch.testing.assert_close(found, expected)


def test_expert_linear_refuses_an_expert_out_of_range() -> None:
    with pytest.raises(IndexError, match="expert 3 of 3"):
        reference.expert_linear(torch.ones(1, 4), torch.ones(6, 4), None, torch.tensor([[3]]), num_experts=3)
