"""Refitting a linear layer whose input channels are cut: the kept channels take over a part of the removed channels.

With G = mean x x^T over calibration tokens, the weight V [N, k] of the kept channels nearest to the whole layer's
outputs is a ridge regression, the least ``tr(D G D^T) + penalty ||D||^2``, D the change of the weight with all of a
removed channel in D. SlimLLM (arXiv 2505.22689) refits output matrices likewise. The penalty is on the *change* of
the weight: few tokens can't drive the weight far, and with an endless penalty nothing is refitted.
"""

from __future__ import annotations

import torch
from torch import Tensor


def refitted(weight: Tensor, gram: Tensor, kept: Tensor, damping: float) -> Tensor:
    """The weight [N, k] of the channels ``kept`` [k] of ``weight`` [N, K], with the part of the removed channels.

    Args:
        gram: the mean of x x^T, [K, K].
        damping: the penalty, as a share of the mean of the diagonal of the kept channels' ``gram``.

    Returns:
        float32, computed in float64.
    """
    removed = torch.ones(weight.shape[1], dtype=torch.bool)
    removed[kept] = False
    lost = gram[kept][:, removed].double() @ weight[:, removed].double().T
    change = torch.cholesky_solve(lost, factor(gram[kept][:, kept], damping))
    return (weight[:, kept].double() + change.T).to(torch.float32)


def factor(gram: Tensor, damping: float) -> Tensor:
    """The lower Cholesky factor of ``gram`` with the penalty, float64.

    Raises:
        ValueError: the calibration activations are not finite.
    """
    if not bool(gram.isfinite().all()):
        raise ValueError("the calibration activations are not finite")
    damped = gram.double()
    penalty = (damping * damped.diagonal().mean()).clamp_min(torch.finfo(torch.float32).tiny)
    damped.diagonal().add_(penalty)
    return torch.linalg.cholesky(damped)
