"""The choice between variants of a layer, and linear layers of heads."""

from __future__ import annotations

import pytest
import torch

from optkit.kernels import reference


@pytest.mark.parametrize("limit", [4, 5])
def test_by_tokens_is_the_first_variant_up_to_the_limit(limit: int) -> None:
    few, many = torch.zeros(5, 2), torch.ones(5, 2)
    assert bool(reference.by_tokens(few, many, torch.arange(5), limit).any()) == (limit < 5)


def test_head_linear_multiplies_each_head_by_its_rows_of_the_weight() -> None:
    """Three heads with five rows of seven channels each, by loops in float64."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(15, 7, generator=generator)
    options = {"num_heads": 3, "first": 1, "last": 4}
    wide, narrow = (torch.randn(2, 3, n, generator=generator) for n in (7, 3))
    out = reference.head_linear(wide, weight, **options)
    back = reference.head_linear(narrow, weight, **options, transposed=1)
    assert out.shape == (2, 3, 3) and back.shape == (2, 3, 7)
    for token in range(2):
        for head in range(3):
            matrix = weight[5 * head + 1 : 5 * head + 4].double()
            expected = matrix @ wide[token, head].double(), matrix.T @ narrow[token, head].double()
            torch.testing.assert_close(out[token, head].double(), expected[0], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(back[token, head].double(), expected[1], rtol=1e-5, atol=1e-6)
