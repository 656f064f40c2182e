"""int8 layers in exact parts, native, against the reference and the whole layer, to the bit; ranks in threads."""

from __future__ import annotations

import pytest
import torch

from optkit.errors import CollectiveFailed
from optkit.kernels import reference
from optkit.kernels.collectives import Threads, borders, current, shares, using
from optkit.kernels.cpu import collectives, int8, native
from optkit.kernels.cpu.shared_memory import SharedRank, SharedRegion
from optkit.parallel.in_threads import in_threads
from tests.kernels.test_int8 import fitting

pytestmark = pytest.mark.skipif(not native.available(), reason="native kernels are missing")
SIZES = [(1, 4, 3), (5, 64, 33), (40, 1024, 70), (7, 2052, 16), (3, 4096, 65)]  # rows, channels, results


@pytest.fixture(params=native.usable_isas() if native.available() else [])
def isa(request: pytest.FixtureRequest) -> object:
    native.set_isa(request.param)
    yield request.param
    native.set_isa(None)


def layer(rows: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(rows, k, generator=generator)
    weight = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
    weight[:32] = fitting(weight[:32])  # the first panel; others saturate 16 bits
    return x, weight, torch.rand(n, 1, generator=generator), torch.randn(n, generator=generator)


@pytest.mark.parametrize("sizes", SIZES)
def test_sums_are_exact(sizes: tuple[int, int, int], isa: str) -> None:
    x, weight, _, _ = layer(*sizes)
    q, _ = reference.quantize_per_token(x)
    packed = collectives.pack_pieces({1: weight})[1]
    assert torch.equal(collectives.int8_sums(q, packed), reference.int8_sums(q, weight))


def test_the_largest_sums_are_exact(isa: str) -> None:
    q, weight = torch.full((2, 4096), 1, dtype=torch.uint8), torch.full((33, 4096), -128, dtype=torch.int8)
    packed = collectives.pack_pieces({1: weight})[1]
    assert (collectives.int8_sums(q, packed) == 127 * 128 * 4096).all()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_parts_of_a_layer_add_up_to_the_bits_of_the_layer(
    sizes: tuple[int, int, int], with_bias: bool, isa: str
) -> None:
    x, weight, weight_scale, bias = layer(*sizes)
    given = bias if with_bias else None
    q, scale = int8.quantize_per_token(x)
    packed = int8.pack({2: weight, 3: weight_scale})
    expected = int8.linear_w8a8(q, scale, packed[2], packed[3], given)
    middle = sizes[1] // 8 * 4
    halves = [(0, middle), (middle, sizes[1])] if middle else [(0, sizes[1])]
    most = torch.stack([collectives.absmax_per_token(x[:, a:b]) for a, b in halves]).amax(0)
    total = torch.zeros(sizes[0], sizes[2], dtype=torch.int32)
    for a, b in halves:
        part, found = collectives.quantize_by(x[:, a:b], most)
        assert torch.equal(part, q[:, a:b]) and torch.equal(found, scale)
        total += collectives.int8_sums(part, collectives.pack_pieces({1: weight[:, a:b]})[1])
    vectors = collectives.vector({2: weight_scale})
    assert torch.equal(collectives.dequantize_sums(total, scale, vectors[2], given), expected)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e-40])
def test_rows_out_of_the_ordinary_quantize_as_the_whole_row_does(value: float) -> None:
    x = torch.randn(3, 8)
    x[1, 2], x[2] = value, 0.0
    q, scale = int8.quantize_per_token(x)
    found, most = collectives.quantize_by(x, collectives.absmax_per_token(x))
    assert torch.equal(found, q)
    torch.testing.assert_close(most, scale, rtol=0, atol=0, equal_nan=True)


def test_codes_outside_of_a_table_have_a_row_of_zeros() -> None:
    ids = torch.tensor([0, 3, 4, 6, 7, 90])
    assert reference.local_ids(ids, 4, 3).tolist() == [3, 3, 0, 2, 3, 3]


def test_shares_are_whole_units_and_differ_by_one() -> None:
    assert shares(96, 32, 2) == [32, 64] and borders(96, 32, 2) == [0, 32, 96]
    assert shares(49_152, 1, 3) == [16_384] * 3 and sum(shares(50_257, 1, 4)) == 50_257


def test_the_communicator_is_that_of_the_body() -> None:
    with pytest.raises(RuntimeError, match="needs the communicator"):
        current()
    rank = Threads(1).ranks[0]
    with using(rank):
        assert current() is rank
        assert torch.equal(reference.all_reduce(torch.ones(2)), torch.ones(2))
        assert reference.all_gather(torch.ones(2, 3), 2).shape == (2, 2)
    with pytest.raises(RuntimeError):
        current()


def test_a_thread_that_waits_for_a_failed_one_fails() -> None:
    group = Threads(2, timeout=0.05)
    with pytest.raises(CollectiveFailed, match="another rank failed"):
        group.ranks[0].all_reduce(torch.ones(1), "sum")


@pytest.mark.parametrize("rows", [1, 7])
def test_a_broadcast_in_shared_memory_gives_the_rows_of_one_rank_to_all(rows: int) -> None:
    region = SharedRegion(3)
    ranks = [SharedRank(region, rank, spin=1e-6) for rank in range(3)]
    x, ids = torch.randn(rows, 5), torch.arange(rows)

    def run(rank: int) -> torch.Tensor:
        first = reference.broadcast(ids, x if rank == 1 else None, None, 5, 1)
        return reference.broadcast(ids, first + 1 if rank == 2 else None, first, 5, 2)

    for found in in_threads(run, 3, ranks):
        assert torch.equal(found, x + 1)
