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
    best = torch.ones(x.shape[1])
    least = smoothed_error(x, weight, best, group_size)
    for magnitude in (x.abs().amax(dim=0), x.square().mean(dim=0).sqrt()):
        for point in range(POINTS):
            scale = smoothing_scale(magnitude, [weight], point / (POINTS - 1))
            error = smoothed_error(x, weight, scale, group_size)
            if error < least:
                best, least = scale, error
    return best


def smoothed_error(x: Tensor, weight: Tensor, scale: Tensor, group_size: int) -> float:
    """Expected squared error of a token's outputs, by the module's formula."""
    lost_x = rounding_error(x / scale, group_size).square().mean(dim=0)
    lost_w = rounding_error(weight * scale, group_size).square().sum(dim=0)
    own_x, own_w = x.square().mean(dim=0), weight.square().sum(dim=0)
    return float((lost_x * scale.square() * own_w + lost_w * own_x / scale.square()).sum())


def rounding_error(values: Tensor, group_size: int) -> Tensor:
    """The squared error of int8 with a scale for each run of channels, on values [M, K]."""
    groups = values.unflatten(1, (-1, group_size or values.shape[1]))
    step = groups.abs().amax(dim=2, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / LEVELS
    return (torch.round(groups / step) * step - groups).flatten(1)
