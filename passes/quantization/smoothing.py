"""Search of the smoothing scale: for each channel, the scale with the least error of W8A8.

With scale ``s_j``, channel j of an activation is divided by ``s_j`` and column j of the weights multiplied. Rounding
errors of activations and weights are nearly independent of each other and between channels, so the squared error of a
layer's outputs is a sum over channels: ``E[e_x^2] * s^2 |w|^2`` from rounding the smoothed activation, plus ``|e_w|^2 *
E[x^2] / s^2`` from rounding the smoothed weight. Rounding once gives both errors; no matrix is multiplied. The tried
scales are SmoothQuant's (arXiv 2211.10438) for exponents from 0 to 1, from the largest value of each channel and from
the channel's root mean square: where few channels share an int8 scale, the usual size of a channel matters more than
the largest value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

POINTS = 11  # exponents tried
LEVELS = 127.0
BLOCK_VALUES = 1 << 19  # 2 MB of float32


def smoothing_scale(magnitude: Tensor, weights: Sequence[Tensor], alpha: float) -> Tensor:
    """``s = magnitude^alpha / max|w|^(1 - alpha)`` [K], normalized to geometric mean 1.

    magnitude [K] is of the activation's channels; weights [N, K] read the activation.
    """
    w_absmax = torch.stack([w.abs().amax(dim=0) for w in weights]).amax(dim=0)
    scale = magnitude.clamp_min(1e-5) ** alpha / w_absmax.clamp_min(1e-5) ** (1 - alpha)
    return scale / scale.log().mean().exp()


def search_smoothing(x: Tensor, weights: Sequence[Tensor], group_size: int) -> Tensor:
    """The scale [K] for activations x [T, K] and their readers, weights [N, K]; ones if no scale is better.

    ``group_size`` channels of a token, and of a weight row, will share an int8 scale; 0: all.
    """
    weight = torch.cat([w.to(torch.float32) for w in weights])
    largest = weight.abs().amax(dim=0, keepdim=True)
    scales = [torch.ones(x.shape[1])]
    for magnitude in (x.abs().amax(dim=0), x.square().mean(dim=0).sqrt()):
        scales += [smoothing_scale(magnitude, [largest], point / (POINTS - 1)) for point in range(POINTS)]
    tried = torch.stack(scales)
    return tried[int(smoothed_errors(x, weight, tried, group_size).argmin())]


def smoothed_errors(x: Tensor, weight: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """Expected squared errors [C] of a token's outputs with each of ``scales`` [C, K], by the module's formula."""
    squares = scales.double().square()
    lost_x = squared_rounding_errors(x, scales.reciprocal(), group_size) / len(x)
    lost_w = squared_rounding_errors(weight, scales, group_size)
    own_x, own_w = x.square().mean(dim=0), weight.square().sum(dim=0)
    return (lost_x * squares * own_w + lost_w * own_x / squares).sum(dim=1)


def squared_rounding_errors(values: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """Sums [C, K] over the rows of values [M, K] of squared errors of int8, for values times each of ``scales`` [C, K].

    A few rows at a time are scaled by all candidates, in buffers that stay in the processor's cache. The C library
    returns new temporaries of this size to the system after each use, and page faults take longer than arithmetic.
    """
    columns = values.shape[1]
    sums = torch.zeros(scales.shape, dtype=torch.float64)
    buffers = torch.empty(2, min(len(values), max(1, BLOCK_VALUES // columns)), columns)
    for rows in values.split(buffers.shape[1]):
        scaled, other = (b[: len(rows)].unflatten(1, (-1, group_size or columns)) for b in buffers)
        for total, scale in zip(sums, scales, strict=True):
            torch.mul(rows, scale, out=scaled.view(rows.shape))
            torch.abs(scaled, out=other)
            step = other.amax(dim=2, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny).div_(LEVELS)
            torch.round(scaled.div_(step), out=other)
            total += other.sub_(scaled).mul_(step).square_().view(rows.shape).sum(dim=0)
    return sums
