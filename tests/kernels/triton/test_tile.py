"""Linear layers on the tensor cores: sums split along K, zero points, groups, and the table of tiles."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from optkit.kernels.triton import available

if not available():
    pytest.skip("Triton is not installed", allow_module_level=True)

from optkit.kernels import reference
from optkit.kernels.triton import tile
from tests.kernels.triton.calls import close, poison, random


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with mock.patch.object(torch, "empty", poison):
        yield


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_sums_split_along_k_are_the_same_sums(
    splits: int, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile, "splits_of", lambda programs, k, depth, arch: splits)
    k, group = 416, 32 if grouped else 0
    q, scale = reference.quantize_per_token(random(6, k), group)
    weight = torch.randint(-128, 128, (9, k), dtype=torch.int8)
    weight_scale, bias = torch.rand(9, k // group if group else 1), random(9)
    got = tile.tile(q, weight, scale, weight_scale, bias, torch.float32, None, group)
    wide = [s.double().repeat_interleave(k // s.shape[1], 1) for s in (scale, weight_scale)]
    close(got, ((q.double() - 128) * wide[0]) @ (weight * wide[1]).T + bias, 1e-6)


def test_zero_points_are_taken_from_the_codes() -> None:
    x, codes = random(5, 96), torch.randint(0, 256, (7, 96), dtype=torch.uint8)
    scale, zero = torch.rand(7, 3) * 0.1, torch.randint(0, 256, (7, 3), dtype=torch.uint8)
    weight = (codes.double() - zero.repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1)
    got = tile.tile(x, codes, None, scale, None, torch.float32, zero, 32)
    close(got, x.double() @ weight.T, 1e-4)


def test_step_without_tokens_is_empty() -> None:
    assert tile.tile(random(0, 64), random(6, 64), None, None, None, torch.float32).shape == (0, 6)


@pytest.mark.parametrize(
    ("programs", "k", "splits"),
    [
        (1, 1 << 20, tile.MAX_SPLITS),
        (54, 1 << 20, 4),  # 216 programs for 108 processors
        (200, 1 << 20, 1),
        (1, 1024, 2),  # four tiles of 128 to a part
        (1, 100, 1),
    ],
)
def test_k_is_split_to_fill_the_gpu_twice_into_parts_of_four_tiles(
    programs: int, k: int, splits: int
) -> None:
    assert tile.splits_of(programs, k, 128, "sm_80") == splits


def test_tile_is_the_first_for_the_tokens() -> None:
    configs = tile.CONFIGS["sm_90"]
    assert [tile.config_of(configs, rows).tile[0] for rows in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 128]
