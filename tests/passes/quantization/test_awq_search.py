"""AWQ's searches, judged by the error of outputs on the activations themselves, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.passes.quantization.awq_search import diagonal_blocks, search_clip, search_scale
from optkit.passes.quantization.grid import IntegerGrid, nearest_codes, round_to_nearest

GRID = IntegerGrid(bits=4, group_size=16, symmetric=False)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def loss(x: Tensor, weight: Tensor, rounded: Tensor) -> float:
    return float((x.double() @ (weight - rounded).double().T).pow(2).sum())


def test_search_scale_lowers_the_error_where_some_channels_are_large() -> None:
    x, weight = random(64, 32, seed=0), random(24, 32, seed=1)
    x[:, ::8] *= 30
    scale = search_scale([weight], [GRID], x.abs().mean(0), x.T @ x)
    rounded = round_to_nearest(weight * scale, GRID).dequantize(16) / scale
    plain = round_to_nearest(weight, GRID).dequantize(16)
    assert loss(x, weight, rounded) < 0.5 * loss(x, weight, plain)


def test_search_clip_finds_the_best_range_of_each_row_where_a_group_is_the_whole_row() -> None:
    x, weight = random(64, 16, seed=0), random(24, 16, seed=1)
    x[:, 3] = 0.0  # the channel of the outliers does not count
    weight[:, 3] = 9.0

    def losses(scale: Tensor, minimum: Tensor) -> Tensor:
        rounded = nearest_codes(weight, scale, minimum, GRID) * scale + minimum
        return (x.double() @ (weight - rounded).double().T).pow(2).sum(0)

    low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    shares = [1 - 0.05 * step for step in range(10)]
    tried = torch.stack([losses(*GRID.span(weight.clamp(low * s, high * s))) for s in shares])
    torch.testing.assert_close(
        losses(*search_clip(weight, GRID, x.T @ x)), tried.amin(0), rtol=1e-4, atol=1e-6
    )
    assert tried.amin(0).sum() < 0.7 * tried[0].sum()


def test_diagonal_blocks_are_the_products_within_a_group() -> None:
    matrix = random(12, 12, seed=0)
    blocks = diagonal_blocks(matrix, 4)
    assert all(torch.equal(blocks[g], matrix[4 * g : 4 * g + 4, 4 * g : 4 * g + 4]) for g in range(3))
