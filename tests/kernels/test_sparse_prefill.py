"""Block-sparse prefill by the native kernel: against the spec, and against loops in float64 without the spec."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from optkit.kernels import reference
from optkit.kernels.cpu import native
from optkit.kernels.cpu.attention import attention, sparse_tiles
from optkit.kernels.reference_sparse_prefill import BLOCK, STRIDE, chosen_blocks
from tests.kernels.test_attention import ISAS, Case, World

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))

LENGTH = 5 * BLOCK
CASE = Case((LENGTH,), (0,), kv_heads=2, group=3, dim=24, v_dim=40, block=16)
SPARSE = {"sparse_cover": 0.6, "sparse_from": BLOCK}


def peaked(case: Case) -> World:
    """A world whose blocks of queries look at one block of keys above all: keys of a block have a direction."""
    world = World(case)
    generator = torch.Generator().manual_seed(case.seed + 1)
    for q, k in zip(world.q, world.k, strict=True):
        directions = torch.randn(-(-len(q) // BLOCK), *k.shape[1:], generator=generator)
        for block, start in enumerate(range(0, len(q), BLOCK)):
            rows = slice(start, start + BLOCK)
            wanted = directions[int(torch.randint(0, block + 1, (1,), generator=generator))]
            k[rows] += 2 * directions[block]
            q[rows] += 2 * wanted.repeat_interleave(case.group, 0)
    return world


def call(world: World, kernel: Any, chunks: list[tuple[int, int, int]], **options: Any) -> torch.Tensor:
    return world.call(lambda *args, **given: kernel(*args, **{**given, **SPARSE, **options}), chunks)


def by_hand(world: World, cover: float, first: int) -> tuple[torch.Tensor, int, int]:
    """Attention of the first sequence by loops in float64, tiles read, and tiles that could be read."""
    case, q, k, v = world.case, world.q[0].double(), world.k[0].double(), world.v[0].double()
    scale, out, read, seen = case.dim**-0.5, torch.zeros(len(q), q.shape[1], v.shape[2]).double(), 0, 0
    allowed = torch.ones(case.kv_heads, len(q), len(q), dtype=torch.bool)
    for block in range(-(-first // BLOCK), len(q) // BLOCK):
        for kv in range(case.kv_heads):
            mass = [0.0] * (block + 1)
            for head in range(kv * case.group, (kv + 1) * case.group):
                for at in range(block * BLOCK, (block + 1) * BLOCK, STRIDE):
                    scores = [
                        sum(float(q[at + STRIDE - 1 - t, head] @ k[key + t, kv]) for t in range(STRIDE))
                        * scale
                        / STRIDE
                        for key in range(0, at + 1, STRIDE)
                    ]
                    weights = torch.tensor(scores).double().softmax(0).tolist()
                    for group, weight in enumerate(weights):
                        mass[group * STRIDE // BLOCK] += weight
            total, covered, chosen = sum(mass), 0.0, {0, block, max(0, block - 1)}
            for tile in sorted(range(block + 1), key=lambda tile: -mass[tile]):
                if covered < cover * total:
                    chosen.add(tile)
                covered += mass[tile]
            read, seen = read + len(chosen), seen + block + 1
            for tile in set(range(block + 1)) - chosen:
                rows = slice(block * BLOCK, (block + 1) * BLOCK)
                allowed[kv, rows, tile * BLOCK : (tile + 1) * BLOCK] = False
    for t in range(len(q)):
        for head in range(q.shape[1]):
            kv = head // case.group
            keys = torch.nonzero(allowed[kv, t, : t + 1])[:, 0]
            out[t, head] = (k[keys, kv] @ q[t, head] * scale).softmax(0) @ v[keys, kv]
    return out, read, seen


@pytest.mark.parametrize("isa", ISAS)
def test_the_kernel_reads_the_blocks_of_the_definition(isa: str) -> None:
    native.set_isa(isa)
    before = sparse_tiles()
    found = call(peaked(CASE), attention, [(0, 0, LENGTH)])
    read, seen = (after - first for after, first in zip(sparse_tiles(), before, strict=True))
    expected, wanted, most = by_hand(peaked(CASE), 0.6, BLOCK)
    assert (read, seen) == (wanted, most) and read < 0.9 * seen
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(
        call(peaked(CASE), reference.attention, [(0, 0, LENGTH)]), found, atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim"), [(1, 1, 64), (2, 3, 64), (1, 8, 5), (1, 30, 40), (3, 2, 128)]
)
def test_kernel_and_spec_agree_over_chunks(kv_heads: int, group: int, dim: int, int8: bool) -> None:
    """Two sequences, one after a prefix; full blocks of a call are sparse, parts of blocks dense."""
    case = Case((300, 200), (128, 70), kv_heads, group, dim, 48, 16, int8=int8, seed=3)
    chunks = [(0, 128, 300), (1, 70, 200)]
    outs = []
    for kernel in (attention, reference.attention):
        world = peaked(case)
        world.fill(0, 128)
        world.fill(1, 70)
        outs.append(call(world, kernel, chunks, sparse_from=0))
    tolerance = 2e-2 if int8 else 5e-5  # rounded weights of an int8 cache
    torch.testing.assert_close(outs[0], outs[1], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dim", "v_dim"), [(24, 48), (64, 64)])
def test_int8_codes_choose_the_blocks_of_the_spec(dim: int, v_dim: int, isa: str) -> None:
    """Interleaved codes are multiplied as integers."""
    case = replace(CASE, dim=dim, v_dim=v_dim, int8=True)
    native.set_isa(isa)
    before = sparse_tiles()
    found = call(peaked(case), attention, [(0, 0, LENGTH)])
    read, seen = (after - first for after, first in zip(sparse_tiles(), before, strict=True))
    world = peaked(case)
    q, k = world.q[0], world.k[0]
    steps = k.abs().amax(-1, keepdim=True) / 127
    keys = torch.round(k / steps) * steps
    blocks = range(1, LENGTH // BLOCK)
    chosen = [
        chosen_blocks(q[at * BLOCK :][:BLOCK], keys[: (at + 1) * BLOCK], dim**-0.5, 0.6) for at in blocks
    ]
    assert read == sum(int(each.sum()) for each in chosen)
    assert seen == sum(each.numel() for each in chosen) > 1.1 * read
    expected = call(peaked(case), reference.attention, [(0, 0, LENGTH)])
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("int8", [False, True])
def test_bits_depend_on_no_cut_at_blocks_and_no_thread(int8: bool) -> None:
    case = replace(CASE, int8=int8)
    torch.set_num_threads(2)
    whole = call(peaked(case), attention, [(0, 0, LENGTH)])
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        world = peaked(case)
        parts = [call(world, attention, [(0, a, b)]) for a, b in ((0, 2 * BLOCK), (2 * BLOCK, LENGTH))]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    "options",
    [{"sparse_from": LENGTH}, {"sparse_cover": 0.0}, {"window": 40}, {"chunk": 90}, {"slopes": True}],
)
def test_other_calls_have_the_bits_of_dense_ones(options: dict[str, Any]) -> None:
    case = replace(
        CASE, **{name: value for name, value in options.items() if name in ("window", "chunk", "slopes")}
    )
    given = {name: value for name, value in options.items() if name.startswith("sparse")}
    dense = peaked(case).call(attention, [(0, 0, LENGTH)])
    before = sparse_tiles()
    assert torch.equal(call(peaked(case), attention, [(0, 0, LENGTH)], **given), dense)
    assert sparse_tiles() == before


def test_parts_of_blocks_and_decodes_are_dense() -> None:
    world, twin = peaked(CASE), peaked(CASE)
    for each in (world, twin):
        each.fill(0, 3 * BLOCK + 5)
    chunk = [(0, 3 * BLOCK + 5, 4 * BLOCK)]
    assert torch.equal(call(world, attention, chunk), twin.call(attention, chunk))
    last = [(0, 4 * BLOCK, 4 * BLOCK + 1)]
    assert torch.equal(call(world, attention, last), twin.call(attention, last))


def test_early_queries_are_dense_and_later_ones_sparse() -> None:
    dense = peaked(CASE).call(attention, [(0, 0, LENGTH)])
    found = call(peaked(CASE), attention, [(0, 0, LENGTH)], sparse_from=2 * BLOCK + 1)
    assert torch.equal(found[: 3 * BLOCK], dense[: 3 * BLOCK])
    assert not torch.equal(found[3 * BLOCK :], dense[3 * BLOCK :])


def test_more_cover_reads_more_blocks_up_to_all() -> None:
    world = World(CASE)
    q, k = world.q[0][-BLOCK:], world.k[0]
    counts = [int(chosen_blocks(q, k, CASE.dim**-0.5, cover).sum()) for cover in (0.1, 0.6, 0.9, 0.99999)]
    assert counts == sorted(counts) and counts[0] < counts[-1]
    assert counts[-1] == CASE.kv_heads * LENGTH // BLOCK
