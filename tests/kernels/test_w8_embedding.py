"""Rows of a packed int8 embedding on the native kernel: the bits of the reference, on every instruction set."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optkit.kernels import reference, select
from optkit.kernels.cpu import int8, native
from optkit.kernels.cpu.call_list import TOKENS
from optkit.kernels.cpu.program import Builder
from tests.kernels.test_int8 import poisoned
from tests.support.isas import usable_isas
from tests.support.target import TARGET

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


def table(rows: int, channels: int, groups: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight int8 [rows, channels] and its scales float16 [rows, groups]."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, (rows, channels), generator=generator, dtype=torch.int8)
    return weight, torch.rand(rows, groups, generator=generator).half()


def run(ids: Tensor, packed: dict[int, Tensor]) -> Tensor:
    with mock.patch.object(torch, "empty", poisoned):
        return int8.embedding_w8(ids, packed[1], packed[2])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 100), st.integers(1, 5), st.integers(1, 9), st.integers(0, 40), st.integers(0, 1 << 20))
def test_rows_have_the_bits_of_float64_rounded_once(
    rows: int, groups: int, steps: int, tokens: int, seed: int
) -> None:
    weight, scale = table(rows, 4 * steps * groups, groups, seed)
    ids = torch.randint(0, rows, (tokens,), generator=torch.Generator().manual_seed(seed))
    whole = weight.double().view(rows, groups, -1) * scale.double()[..., None]
    expected = whole.flatten(1)[ids].float()
    assert torch.equal(reference.embedding_w8(ids, weight, scale), expected)
    packed = int8.pack({1: weight, 2: scale})
    for isa in usable_isas():
        native.set_isa(isa)
        assert torch.equal(run(ids, packed), expected)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_many_rows_are_shared_among_threads(threads: int) -> None:
    weight, scale = table(300, 576, 18)
    ids = torch.randint(0, 300, (700,), generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    out = run(ids, int8.pack({1: weight, 2: scale}))
    torch.set_num_threads(before)
    assert torch.equal(out, reference.embedding_w8(ids, weight, scale))


@pytest.mark.parametrize("wrong", [-1, 9, 1 << 40])
def test_an_id_without_a_row_is_refused(wrong: int) -> None:
    weight, scale = table(9, 8, 2)
    packed = int8.pack({1: weight, 2: scale})
    with pytest.raises(IndexError, match="outside of 0 to 8"):
        int8.embedding_w8(torch.tensor([0, wrong]), packed[1], packed[2])


@pytest.mark.parametrize("ids", [torch.tensor([1], dtype=torch.int32), torch.arange(6)[::2]])
def test_ids_of_another_layout_are_refused(ids: Tensor) -> None:
    weight, scale = table(9, 8, 2)
    packed = int8.pack({1: weight, 2: scale})
    with pytest.raises(ValueError, match="ids must be"):
        int8.embedding_w8(ids, packed[1], packed[2])


@pytest.mark.parametrize(("channels", "groups", "found"), [(64, 2, True), (66, 1, False), (12, 6, False)])
def test_only_groups_of_whole_steps_have_the_kernel(channels: int, groups: int, found: bool) -> None:
    weight, scale = table(9, channels, groups)
    assert (select("embedding_w8", TARGET, weights={1: weight, 2: scale}) is not None) == found


def test_a_program_gathers_the_same_rows_and_refuses_the_same_ids() -> None:
    weight, scale = table(40, 64, 2)
    packed = int8.pack({1: weight, 2: scale})
    b = Builder()
    ids = b.input(TOKENS, (), torch.int64, check=False)
    (rows,) = int8.emit_embedding_w8(b, ids, packed[1], packed[2])
    b.output(rows)
    program = b.build()
    empty, pool = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 4, 1, 1)
    step = (torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32), empty, pool)
    given_ids = torch.tensor([39, 0, 31, 32, 7])
    (out,) = program(given_ids, *step, given_ids)
    assert torch.equal(out, reference.embedding_w8(given_ids, weight, scale))
    with pytest.raises(IndexError, match="out of range"):
        program(given_ids, *step, torch.tensor([39, 0, 40, 32, 7]))
