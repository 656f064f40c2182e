"""Paged attention against float64: ragged batches, windows, caps, quantized pools, padding; in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from optkit.kernels.triton import attention
from tests.kernels.triton.worlds import Shape, World, error, planar_write

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}

PROMPTS = Shape(new=(5, 20, 1, 9), old=(0, 50, 40, 3))
SHAPES = {
    "one prompt": Shape(new=(37,), old=(0,)),
    "a chunk": Shape(new=(10,), old=(70,)),
    "mixed": PROMPTS,
    "grouped by 3": Shape(new=(12, 1), old=(60, 70), heads=3),
    "grouped by 7, two KV heads": Shape(new=(12, 1), old=(60, 70), heads=14, kv_heads=2),
    "no groups": Shape(new=(6, 1, 1), old=(10, 0, 90), heads=2, kv_heads=2),
    "decode": Shape(new=(1, 1, 1), old=(5, 150, 31), heads=4),
    "decode, no groups": Shape(new=(1, 1, 1), old=(5, 150, 63), heads=2, kv_heads=2),
    "decode, group of 8": Shape(new=(1, 1), old=(0, 70), heads=8, dim=64),
    "window": Shape(new=(20, 1), old=(60, 90), window=25),
    "window below a tile": Shape(new=(16,), old=(60,), window=2),
    "window, decode": Shape(new=(1, 1), old=(140, 20), window=33, heads=1),
    "chunk": Shape(new=(20, 1), old=(60, 90), chunk=25),
    "chunk, decode": Shape(new=(1, 1, 1), old=(140, 66, 20), chunk=33, heads=1),
    "chunk below a tile, in a window": Shape(new=(16, 70), old=(60, 0), chunk=5, window=3),
    "sinks": Shape(new=(20, 1, 1), old=(60, 90, 0), heads=4, kv_heads=2, sinks=True),
    "sinks, no groups": Shape(new=(1, 9), old=(140, 20), heads=2, kv_heads=2, sinks=True, window=33),
    "slopes": Shape(new=(20, 1, 1), old=(60, 90, 0), heads=4, kv_heads=2, slopes=True),
    "slopes, no groups": Shape(new=(1, 9), old=(140, 20), heads=2, kv_heads=2, slopes=True),
    "slopes, sinks, soft-cap": Shape(
        new=(20, 1), old=(50, 40), softcap=3.0, slopes=True, sinks=True, chunk=40
    ),
    "soft-cap": Shape(new=(20, 1), old=(50, 40), softcap=3.0),
    "soft-cap, decode": Shape(new=(1,), old=(50,), softcap=3.0, heads=1),
    "heads of 80": Shape(new=(18,), old=(20,), dim=80, heads=1),
    "heads of 96, values of 40": Shape(new=(3, 1), old=(20, 40), dim=96, v_dim=40),
    "heads of 128, decode": Shape(new=(1,), old=(80,), dim=128, heads=1),
    "blocks of 32": Shape(new=(10, 1), old=(70, 33), size=32),
    "blocks of 1": Shape(new=(3, 1), old=(20, 7), size=1),
}


@pytest.mark.parametrize("name", SHAPES)
def test_agrees_with_float64(name: str) -> None:
    world = World(SHAPES[name])
    assert error(world.call(attention.attention), world.expected()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", ["a chunk", "decode, no groups"])
@pytest.mark.parametrize("pool", [torch.float16, torch.int8, torch.uint8])
def test_half_precision_and_quantized_pools(name: str, pool: torch.dtype) -> None:
    world = World(replace(SHAPES[name], dtype=torch.float16, pool=pool))
    out = world.call(attention.attention)
    assert out.dtype is torch.float16
    assert error(out, world.expected()) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("pool", [torch.int8, torch.uint8])
def test_quantized_pools_with_float32_queries(pool: torch.dtype) -> None:
    world = World(Shape(new=(6, 1), old=(66, 70), pool=pool, window=40))
    assert error(world.call(attention.attention), world.expected()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_padding_gives_zeros_and_touches_nothing(kv_heads: int) -> None:
    """As a CUDA graph pads: the last sequences have length 0, a token each, and slot -1."""
    world = World(Shape(new=(1, 1, 0), old=(20, 3, 0), heads=2, kv_heads=kv_heads))
    before = world.k_cache.clone()
    out = world.call(attention.attention)
    assert not out[2].any() and error(out, world.expected()) < TOLERANCE[torch.float32]
    assert (world.k_cache.nan_to_num(7.0) != before.nan_to_num(7.0)).flatten(1).any(1).sum() == 2


@pytest.mark.parametrize(
    "shape",
    [
        Shape(new=(1,), old=(700,), heads=1),
        Shape(new=(1, 1), old=(700, 2), heads=4),
        Shape(new=(1,), old=(700,), heads=2, window=300),
        Shape(new=(3,), old=(700,), heads=2),
        Shape(new=(1, 1), old=(700, 2), heads=4, sinks=True, slopes=True),
        Shape(new=(1,), old=(700,), heads=1, sinks=True, slopes=True, chunk=600),
    ],
    ids=["heads", "group", "window", "chunk", "sinks", "sinks of heads"],
)
def test_splits_are_merged(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    merge = attention.Call.merge

    def counted(self: attention.Call, parts: attention.Parts, splits: int, single: bool) -> None:
        seen.append(splits)
        merge(self, parts, splits, single)

    monkeypatch.setattr(attention.Call, "merge", counted)
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 6)
    world = World(shape)
    assert error(world.call(attention.attention), world.expected()) < TOLERANCE[torch.float32]
    assert max(seen) >= 4


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Alone it may be summed in tiles of another size, hence a tolerance."""
    world = World(Shape(new=(5, 12), old=(0, 60)))
    together = world.call(attention.attention)
    starts = world.query_start.tolist()
    for s in range(2):
        rows = slice(starts[s], starts[s + 1])
        alone = attention.paged_attention(
            world.q[rows], world.k[rows], world.v[rows], world.k_cache, world.v_cache,
            torch.tensor([0, rows.stop - rows.start], dtype=torch.int32), world.seq_lens[s : s + 1],
            world.tables[s : s + 1], scale=world.scale,
        )  # fmt: skip
        torch.testing.assert_close(alone, together[rows], rtol=1e-5, atol=1e-6)


def test_extreme_scores_stay_finite() -> None:
    world = World(Shape(new=(9, 1), old=(20, 9)))
    world.q *= 1e4
    out = world.call(attention.attention)
    assert torch.isfinite(out).all() and error(out, world.expected()) < 1e-3


def test_the_written_rows_are_what_is_attended() -> None:
    world, twin = World(SHAPES["decode"]), World(SHAPES["decode"])
    world.call(attention.attention)
    planar_write(twin.k, twin.k_cache, twin.slots)
    assert torch.equal(world.k_cache.nan_to_num(7.0), twin.k_cache.nan_to_num(7.0))
