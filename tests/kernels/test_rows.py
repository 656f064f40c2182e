"""Rows for native kernels: the address arithmetic finds the elements of the tensor."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from optkit.kernels.cpu.rows import all_float32, are_rows_of, as_rows, pointer

BASE = torch.arange(240, dtype=torch.float32)


@pytest.mark.parametrize(
    ("x", "copied"),
    [
        (BASE.view(12, 20), False),
        (BASE.view(12, 20)[:, 3:9], False),
        (BASE.view(12, 20)[::2], False),
        (BASE.view(12, 20).T, True),
        (BASE.view(3, 4, 20), False),
        (BASE.view(3, 4, 20)[..., :7], True),
    ],
)
def test_as_rows_leads_to_every_element(x: Tensor, copied: bool) -> None:
    kept, rows, width, distance = as_rows(x)
    read = [
        list((ctypes.c_float * width).from_address(pointer(kept) + 4 * distance * row)) for row in range(rows)
    ]
    assert read == x.reshape(-1, x.shape[-1]).tolist()
    assert (kept.data_ptr() != x.data_ptr()) == copied


def test_pointer_is_zero_without_a_tensor() -> None:
    assert pointer(None) == 0


def test_all_float32_sees_each_tensor_that_is_there() -> None:
    assert all_float32(BASE, None) and not all_float32(BASE, None, BASE.double())


def test_are_rows_of_wants_dense_vectors_of_the_width() -> None:
    x = BASE.view(12, 20)
    assert are_rows_of(x, None, torch.zeros(20))
    assert not are_rows_of(x, torch.zeros(19)) and not are_rows_of(x, torch.zeros(40)[::2])
