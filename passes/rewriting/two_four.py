"""2:4 sparsity of a weight matrix: of each four channels in a row at most two are not zero.

Three ways to choose, from the cheapest to the best: ``magnitude`` keeps the two largest weights of four; ``wanda``
the two with the largest ``|w_j| * sqrt(mean x_j^2)`` (arXiv 2306.11695); ``sparsegpt`` goes column by column, as GPTQ
does, and corrects the columns to come for what each removed weight did to the outputs (arXiv 2301.00774).
"""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.kernels.two_four import GROUP, KEPT
from optkit.passes.quantization.gptq_solver import inverse_factor

BLOCK = 128  # columns that are updated at once


def kept_of_four(score: Tensor) -> Tensor:
    """True for the two largest of each four scores [N, K] along the last dimension; ties go to the first."""
    fours = score.unflatten(-1, (-1, GROUP))
    best = fours.argsort(dim=-1, descending=True, stable=True)[..., :KEPT]
    return torch.zeros_like(fours, dtype=torch.bool).scatter_(-1, best, True).flatten(-2)


def magnitude(weight: Tensor) -> Tensor:
    """``weight`` [N, K] with the two smallest of each four weights set to zero."""
    return weight.where(kept_of_four(weight.abs()), 0.0)


def wanda(weight: Tensor, hessian: Tensor) -> Tensor:
    """As ``magnitude``, with weights times the size of their channel; ``hessian`` [K, K] is the mean of x x^T."""
    return weight.where(kept_of_four(weight.abs() * hessian.diagonal().clamp_min(0).sqrt()), 0.0)


def sparsegpt(weight: Tensor, hessian: Tensor, damping: float) -> Tensor:
    """The 2:4 weight for ``weight`` [N, K], with the error of each removed weight corrected in later columns.

    The cost of removing weight k is ``(w_k / U[k, k])^2``, U the upper Cholesky factor of the inverse of ``hessian``
    [K, K], the mean of x x^T over calibration tokens; ``damping`` of the mean of the diagonal is added to it first.

    Raises:
        ValueError: the hessian holds NaN or infinity.
    """
    if not bool(hessian.isfinite().all()):
        raise ValueError("the calibration activations are not finite")
    rest = weight.to(torch.float32).T.contiguous()  # [K, N], the columns not yet done
    factor = inverse_factor(hessian, damping)
    scale = factor.diagonal()
    found = torch.zeros_like(rest)
    kept = torch.empty(0)
    for start in range(0, len(rest), BLOCK):
        stop = min(start + BLOCK, len(rest))
        errors = torch.empty(stop - start, rest.shape[1])
        for i in range(start, stop):
            if i % GROUP == 0:
                cost = (rest[i : i + GROUP] / scale[i : i + GROUP, None]).abs()
                kept = kept_of_four(cost.T).T
            here = kept[i % GROUP]
            found[i] = rest[i].where(here, 0.0)
            errors[i - start] = error = rest[i].masked_fill(here, 0.0) / scale[i]
            rest[i + 1 : stop].addr_(factor[i, i + 1 : stop], error, alpha=-1)
        rest[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return found.T.contiguous()
