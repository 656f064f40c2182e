"""Orthogonal matrices for rotations: Hadamard matrices, and random ones where no Hadamard matrix is known.

A Hadamard matrix has entries of +1 and -1 and orthogonal rows; divided by the root of the order, the matrix is
orthogonal. A rotated vector has each original channel in all channels, with equal weight, so an outlier is spread
evenly. Random signs before the matrix (QuaRot, arXiv 2404.00456) keep a constant vector from becoming an outlier.

Orders are ``m * 2^k``. Sylvester's construction gives the powers of two. Paley's constructions over the integers modulo
a prime (1933) give ``m``: 12, 20, 28, 36 and others. The product of both is a Kronecker product, so a rotation costs a
few hundred multiplications a value, and the full matrix is never stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 8192  # rotated at once, in float64
SYLVESTER = 6  # a factor for powers of two is of order 2^6 at most


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix Q [n, n]: ``diag(signs) @ kron(*factors)``.

    Attributes:
        signs: +1 and -1, float64 [n].
        factors: orthogonal matrices, float64, with orders whose product is n.
        hadamard: True where all entries of Q have equal magnitude.
    """

    signs: Tensor
    factors: tuple[Tensor, ...]
    hadamard: bool

    def __call__(self, x: Tensor) -> Tensor:
        """``x @ Q`` for x [..., n], computed in float64, in the dtype of ``x``."""
        rows = x.reshape(-1, x.shape[-1])
        return torch.cat([self.rotated(piece) for piece in rows.split(ROWS)]).reshape(x.shape)

    def rotated(self, rows: Tensor) -> Tensor:
        """``rows @ Q`` for rows [R, n], in the dtype of ``rows``."""
        value = (rows.to(torch.float64) * self.signs).unflatten(-1, [len(factor) for factor in self.factors])
        for factor in self.factors:  # the first dimension becomes the last; at the end the order is as before
            value = value.movedim(1, -1) @ factor
        return value.flatten(1).to(rows.dtype)


def rotation(order: int, seed: int) -> Rotation:
    """A rotation of vectors of ``order`` channels, a Hadamard matrix with random signs where one is known."""
    generator = torch.Generator().manual_seed(seed)
    signs = 1.0 - 2.0 * torch.randint(0, 2, (order,), generator=generator, dtype=torch.float64)
    known = hadamard_factors(order)
    if known is not None:
        return Rotation(signs, tuple(factor / math.sqrt(len(factor)) for factor in known), True)
    gaussian = torch.randn(order, order, generator=generator, dtype=torch.float64)
    return Rotation(signs, (torch.linalg.qr(gaussian).Q,), False)


def hadamard_factors(order: int) -> list[Tensor] | None:
    """Hadamard matrices, float64, with a Kronecker product of ``order``; None where no construction is known here."""
    powers = (order & -order).bit_length() - 1
    for power in range(powers, -1, -1):
        core = paley(order >> power)
        if core is not None:
            sizes = [SYLVESTER] * (power // SYLVESTER) + [power % SYLVESTER]
            factors = [core, *(sylvester(size) for size in sizes)]
            return [factor for factor in factors if len(factor) > 1] or [core]
    return None


def sylvester(power: int) -> Tensor:
    """The Hadamard matrix of order ``2^power``, float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(power):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix


def paley(order: int) -> Tensor | None:
    """The Hadamard matrix of Paley's first or second construction over a prime field, float64, or None.

    The first construction is of order ``q + 1`` for a prime q of the form 4i + 3, the second of order ``2 (q + 1)`` for
    4i + 1. Order 1 is trivial.
    """
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    q = order - 1
    if q % 4 == 3 and is_prime(q):
        return torch.eye(order, dtype=torch.float64) + bordered(q, -1.0)
    q = order // 2 - 1
    if order % 4 == 0 and q % 4 == 1 and is_prime(q):
        plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        diagonal = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        eye = torch.eye(q + 1, dtype=torch.float64)
        return torch.kron(bordered(q, 1.0), plus) + torch.kron(eye, diagonal)
    return None


def bordered(q: int, sign: float) -> Tensor:
    """The Jacobsthal matrix of the prime q, with a row of ones above and a column of ``sign`` on the left.

    Entry (i, j) of the Jacobsthal matrix [q, q] is the Legendre symbol of i - j: 0 on the diagonal, 1 where the
    difference is a square modulo q, else -1.
    """
    symbol = torch.full((q,), -1.0, dtype=torch.float64)
    symbol[[i * i % q for i in range(1, q)]] = 1.0
    symbol[0] = 0.0
    index = torch.arange(q)
    matrix = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    matrix[1:, 1:] = symbol[(index[:, None] - index) % q]
    matrix[0, 1:], matrix[1:, 0] = 1.0, sign
    return matrix


def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
