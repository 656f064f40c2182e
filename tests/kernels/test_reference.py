"""The choice between variants of a layer."""

from __future__ import annotations

import pytest
import torch

from optkit.kernels import reference


@pytest.mark.parametrize("limit", [4, 5])
def test_by_tokens_is_the_first_variant_up_to_the_limit(limit: int) -> None:
    few, many = torch.zeros(5, 2), torch.ones(5, 2)
    assert bool(reference.by_tokens(few, many, torch.arange(5), limit).any()) == (limit < 5)
