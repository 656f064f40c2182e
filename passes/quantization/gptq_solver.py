"""GPTQ: round a weight column by column, and correct the columns not yet rounded for each rounding error.

Frantar et al., arXiv 2210.17323. A layer's output error over calibration inputs x is ``tr(D H D^T)`` with ``D`` the
change of the weight and ``H = sum of x x^T``. With U the upper Cholesky factor of the inverse of H, the best correction
for rounding column k is to subtract ``error_k / U[k, k] * U[k, j]`` from every later column j. Columns are rounded in
blocks: columns of the same block are updated at once, the rest of the matrix once a block, by a matrix product.

Weights are held transposed, [K, N], so the N values of a column are contiguous in memory.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from optkit.passes.quantization.grid import Grid, QuantizedWeight, fit_groups, group_of, nearest_codes

ActOrder = Literal["static", "group"]
BLOCK = 64
STRIPS = 4  # more would be too narrow for matrix products
ATTEMPTS = 4  # each with ten times the damping


def gptq(
    weight: Tensor,
    hessian: Tensor,
    grid: Grid,
    *,
    damping: float = 0.01,
    actorder: ActOrder | None = None,
    static_groups: bool = False,
    fitted: tuple[Tensor, Tensor] | None = None,
) -> QuantizedWeight:
    """Quantize weight [N, K] given ``hessian`` [K, K], the sum or mean of x x^T over calibration tokens.

    Args:
        damping: of the mean of H's diagonal, added to the diagonal.
        actorder: round columns of large H first. ``static`` keeps the groups by position, ``group`` makes groups in
            the order of rounding, so the result has a ``g_idx``.
        static_groups: fit all grids to the original weight, not to the updated weight at the group's turn;
            implied by actorder ``static``.
        fitted: (scale, minimum) [N, G] to use as static grids.

    A channel without calibration values (a dead column) is rounded to nearest and moves nothing.

    Raises:
        ValueError: H holds NaN or infinity.
    """
    n, k = weight.shape
    size = grid.group_size or k
    if not bool(hessian.isfinite().all()):
        raise ValueError("the calibration activations are not finite")
    order = hessian.diagonal().argsort(descending=True, stable=True) if actorder else torch.arange(k)
    rest = weight.to(torch.float32).T[order].contiguous()  # [K, N], the weights not yet rounded
    factor = inverse_factor(hessian[order][:, order], damping)
    static = static_groups or actorder == "static" or fitted is not None
    group = group_of(k, size)
    if static:
        scale, minimum = (t.T.contiguous() for t in (fitted or fit_groups(weight.to(torch.float32), grid)))
        group = group[order] if actorder == "static" else group
    else:
        scale, minimum = (torch.empty(-(-k // size), n) for _ in range(2))
    codes = torch.empty(k, n, dtype=torch.uint8)
    groups = group.tolist()
    block = BLOCK if size % BLOCK == 0 or BLOCK % size == 0 else size
    for start in range(0, k, block):
        stop = min(start + block, k)
        errors = torch.empty(stop - start, n)
        for i in range(start, stop):
            if not static and i % size == 0:
                fit = grid.fit(rest[i : i + size].T)
                scale[groups[i]], minimum[groups[i]] = (value[:, 0] for value in fit)
            s, m = scale[groups[i]], minimum[groups[i]]
            code = nearest_codes(rest[i], s, m, grid)
            codes[i] = code
            errors[i - start] = error = (rest[i] - torch.addcmul(m, code, s)) / factor[i, i]
            rest[i + 1 : stop].addr_(factor[i, i + 1 : stop], error, alpha=-1)
        rest[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    back = order.argsort()
    g_idx = group[back].to(torch.int32) if actorder == "group" else None
    return QuantizedWeight(codes[back].T.contiguous(), scale.T.contiguous(), minimum.T.contiguous(), g_idx)


def add_products(hessian: Tensor, x: Tensor) -> None:
    """Add ``x^T x`` of x [T, K] to ``hessian`` [K, K], on and above the diagonal; what is below means nothing.

    Strips of rows from the diagonal on are 5/8 of the whole product.
    """
    size = -(-len(hessian) // STRIPS)
    for start in range(0, len(hessian), size):
        hessian[start : start + size, start:].addmm_(x[:, start : start + size].T, x[:, start:])


def mirrored(hessian: Tensor) -> Tensor:
    """The symmetric matrix from ``hessian``, an upper triangle with diagonal."""
    return hessian.triu() + hessian.triu(1).T


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """U [K, K] upper triangular with ``U^T U = (H + damping * mean(diag H) I)^-1``; damping grows as needed."""
    diagonal = hessian.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    for attempt in range(ATTEMPTS):
        damped = hessian.to(torch.float32).clone()
        damped.diagonal().add_(diagonal * damping * 10**attempt)
        lower, failed = torch.linalg.cholesky_ex(damped / diagonal)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
    return torch.eye(len(hessian))  # nothing to be learned from such activations: round to nearest


def output_error(weight: Tensor, other: Tensor, hessian: Tensor) -> float:
    """``tr(D H D^T)`` for the change D [N, K] between two weights: the squared error of the layer's outputs."""
    change = other.to(torch.float32) - weight.to(torch.float32)
    return float(((change @ hessian) * change).sum())
