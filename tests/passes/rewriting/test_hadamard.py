"""Hadamard matrices by their definition, in exact integers, and rotations against the full matrix."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from optkit.passes.rewriting.hadamard import Rotation, hadamard_factors, paley, rotation

ORDERS = [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 60, 64, 68, 72, 76, 80, 84, 96, 104, 128, 144, 576,
          640, 896, 960, 1152, 1344, 1536, 2048, 2304, 2560]  # fmt: skip


def kronecker(factors: list[Tensor]) -> Tensor:
    return functools.reduce(torch.kron, factors)


def full(q: Rotation) -> Tensor:
    """The matrix of a rotation."""
    return q.signs[:, None] * kronecker(list(q.factors))


@pytest.mark.parametrize("order", ORDERS)
def test_hadamard_has_orthogonal_rows_of_signs(order: int) -> None:
    factors = hadamard_factors(order)
    assert factors is not None
    matrix = kronecker(factors)
    assert matrix.shape == (order, order) and (matrix.abs() == 1).all()
    product = matrix @ matrix.T  # sums of up to 2560 signs: exact in float64
    assert torch.equal(product, order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("order", [12, 20, 24, 28, 36, 44, 60, 68, 76, 84, 104, 108])
def test_paley_gives_the_matrix_when_the_order_is_one_of_the_constructions(order: int) -> None:
    matrix = paley(order)
    assert matrix is not None
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("order", [3, 6, 18, 50, 52, 92, 100])
def test_paley_gives_none_when_no_prime_fits(order: int) -> None:
    """52 and 100 need fields of 25 and 49 elements, 92 another construction, the rest have no Hadamard matrix."""
    assert paley(order) is None


@pytest.mark.parametrize(
    ("order", "hadamard"), [(1, True), (16, True), (36, True), (576, True), (50, False), (92, False)]
)
def test_rotation_multiplies_by_an_orthogonal_matrix(order: int, hadamard: bool) -> None:
    q = rotation(order, seed=3)
    matrix = full(q)
    assert q.hadamard is hadamard
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(order, dtype=torch.float64), atol=1e-12, rtol=0)
    x = torch.randn(3, 5, order, dtype=torch.float64)
    torch.testing.assert_close(q(x), x @ matrix, atol=1e-12, rtol=1e-12)
    one_hot = torch.zeros(order, dtype=torch.float64).index_fill(0, torch.tensor(order // 2), 1.0)
    assert ((q(one_hot).abs() * order**0.5 - 1).abs() < 1e-9).all() == hadamard


def test_rotation_keeps_the_dtype_and_computes_in_float64() -> None:
    q, x = rotation(576, seed=0), torch.randn(7, 576)
    expected = (x.double() @ full(q)).float()
    torch.testing.assert_close(q(x), expected, atol=0, rtol=2e-7)  # the last bit, by another order of sums


def test_rotation_differs_by_seed_and_repeats() -> None:
    x = torch.randn(36)
    assert torch.equal(rotation(36, 1)(x), rotation(36, 1)(x))
    assert not torch.equal(rotation(36, 1)(x), rotation(36, 2)(x))
