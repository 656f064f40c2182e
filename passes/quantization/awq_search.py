"""AWQ: scale input channels before rounding, so that important channels lose less; then clip the ranges of groups.

Lin et al., arXiv 2306.00978. Column k of a weight is multiplied by ``s_k`` and the activation divided by ``s_k``. In
exact arithmetic the product is unchanged; the column's share of rounding errors becomes smaller. ``s = mean|x|^a /
mean|w|^(1 - a)``, with an exponent found by trying. Then a group's range is shrunk where the finer steps gain more
than the clipped values lose.

Scales and ranges are judged by the squared error of outputs, ``tr(D H D^T)`` over all calibration tokens. The paper's
code computes the error from a sample of the activations; with H no activation is stored. Clipping looks at a single
group at a time, so the diagonal blocks of H are enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optkit.passes.quantization.gptq_solver import output_error
from optkit.passes.quantization.grid import Grid, nearest_codes, round_to_nearest, runs

POINTS = 20  # exponents tried
CLIPS = 10  # ranges tried, from the whole down to half
SMALL = 1e-4


def search_scale(
    weights: Sequence[Tensor],
    grids: Sequence[Grid],
    x_mean: Tensor,
    hessian: Tensor,
    duo_scaling: bool = True,
) -> Tensor:
    """The scale [K] with the least output error of ``weights`` [N, K] on a common activation.

    Args:
        grids: the grid of each weight.
        x_mean: mean magnitude of each channel [K].
        hessian: [K, K], as in ``gptq``.
        duo_scaling: let the weights' magnitudes count too, as AutoAWQ does.

    Returns ones if no scale is better.
    """
    w_mean = torch.cat(
        [relative_magnitude(w, g.group_size) for w, g in zip(weights, grids, strict=True)]
    ).mean(0)
    best = torch.ones_like(x_mean)
    least = scaled_error(weights, grids, best, hessian)
    for point in range(POINTS):
        exponent = point / POINTS
        scale = x_mean.clamp_min(SMALL) ** exponent
        if duo_scaling:
            scale = scale / (w_mean ** (1 - exponent) + SMALL)
        scale = scale.clamp_min(SMALL)
        scale = scale / (scale.max() * scale.min()).sqrt()
        error = scaled_error(weights, grids, scale, hessian)
        if error < least:
            best, least = scale, error
    return best


def scaled_error(weights: Sequence[Tensor], grids: Sequence[Grid], scale: Tensor, hessian: Tensor) -> float:
    """Output error when the weights are scaled, rounded and scaled back."""
    total = 0.0
    for weight, grid in zip(weights, grids, strict=True):
        rounded = round_to_nearest(weight * scale, grid).dequantize(grid.group_size) / scale
        total += output_error(weight, rounded, hessian)
    return total


def relative_magnitude(weight: Tensor, group_size: int) -> Tensor:
    """|w| over the largest |w| of the group, [N, K]."""
    parts = []
    for run in runs(weight.shape[1], group_size):
        groups = (
            weight[:, run].unflatten(1, (-1, min(group_size or weight.shape[1], run.stop - run.start))).abs()
        )
        parts.append((groups / groups.amax(dim=-1, keepdim=True).clamp_min(1e-12)).flatten(1))
    return torch.cat(parts, dim=1)


def search_clip(weight: Tensor, grid: Grid, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, minimum) [N, G] of the cheapest grids, fitted to a group's values or a part of the range."""
    size = grid.group_size or weight.shape[1]
    found = []
    for run in runs(weight.shape[1], grid.group_size):
        width = min(size, run.stop - run.start)
        groups = weight[:, run].unflatten(1, (-1, width))  # [N, G, g]
        blocks = diagonal_blocks(hessian[run, run], width)
        best = grid.fit(groups)
        least = group_errors(groups, best, grid, blocks)
        for step in range(1, CLIPS):
            share = 1 - 0.5 * step / CLIPS
            low, high = (groups.amin(-1, keepdim=True) * share, groups.amax(-1, keepdim=True) * share)
            tried = grid.span(torch.minimum(torch.maximum(groups, low), high))
            error = group_errors(groups, tried, grid, blocks)
            better = error < least
            least = torch.where(better, error, least)
            best = (torch.where(better, tried[0], best[0]), torch.where(better, tried[1], best[1]))
        found.append(best)
    scale, minimum = (torch.cat([f[i][..., 0] for f in found], dim=1) for i in (0, 1))
    return scale, minimum


def diagonal_blocks(hessian: Tensor, width: int) -> Tensor:
    """The blocks of [K, K] between channels of a group: [G, g, g]."""
    tiled = hessian.unflatten(0, (-1, width)).unflatten(2, (-1, width))  # [G, g, G, g]
    return tiled.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def group_errors(groups: Tensor, fit: tuple[Tensor, Tensor], grid: Grid, blocks: Tensor) -> Tensor:
    """Output error of each group alone [N, G, 1]."""
    scale, minimum = fit
    change = nearest_codes(groups, scale, minimum, grid) * scale + minimum - groups
    weighted = torch.einsum("ngi,gij->ngj", change, blocks)
    return (weighted * change).sum(dim=-1, keepdim=True)
