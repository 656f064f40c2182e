"""Weight-only int8 on the native kernel: close to float, and the same bits in every batch, thread count and ISA."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.cpu import int8, native
from tests.kernels.test_int8 import layers, poisoned, weights_of
from tests.support.isas import usable_isas

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


def run(x: Tensor, packed: dict[int, Tensor], bias: Tensor | None = None) -> Tensor:
    with mock.patch.object(torch, "empty", poisoned):
        return int8.linear_w8a16(x, packed[1], packed[2], bias)


def problem(m: int, k: int, n: int, group: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    weight, scale = weights_of(n, k, group, half=seed % 2 == 1)
    return torch.randn(m, k) * torch.rand(k) * 10, weight, scale


@settings(deadline=None, max_examples=100)
@given(layers(), st.booleans(), st.integers(1, 4))
def test_close_to_float_weights(layer: tuple[int, int, int, int, int], biased: bool, threads: int) -> None:
    x, weight, scale = problem(*layer)
    bias = torch.randn(weight.shape[0]) if biased else None
    torch.set_num_threads(threads)
    out = run(x, int8.pack({1: weight, 2: scale}), bias)
    exact = reference.linear_w8a16(x.double(), weight, scale.double(), bias.double() if biased else None)
    # each activation is off by at most 2^-16 of its group's largest, and float32 adds its own rounding
    group = weight.shape[1] // scale.shape[1]
    most = x.abs().unflatten(1, (-1, group)).amax(2, keepdim=True).expand(-1, -1, group).flatten(1).double()
    size = (weight.double().unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1).abs()
    bound = most @ size.T * (2.0**-16 + (scale.shape[1] + 4) * 2.0**-23) + 1e-5
    assert bool(((out - exact).abs() <= bound).all())


@settings(deadline=None, max_examples=40)
@given(layers(), st.integers(1, 4))
def test_a_row_has_the_same_bits_in_any_batch(layer: tuple[int, int, int, int, int], threads: int) -> None:
    x, weight, scale = problem(*layer)
    packed = int8.pack({1: weight, 2: scale})
    torch.set_num_threads(threads)
    together = run(x, packed)
    torch.set_num_threads(1)
    row = layer[-1] % len(x)
    assert torch.equal(run(x[row : row + 1], packed)[0], together[row])


@settings(deadline=None, max_examples=30)
@given(layers())
def test_instruction_sets_give_the_same_bits(layer: tuple[int, int, int, int, int]) -> None:
    x, weight, scale = problem(*layer)
    packed = int8.pack({1: weight, 2: scale})
    results = []
    for isa in usable_isas():
        native.set_isa(isa)
        results.append(run(x, packed))
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_row_that_is_not_a_number_spoils_only_itself() -> None:
    x, weight, scale = problem(5, 64, 40, 32, 0)
    packed = int8.pack({1: weight, 2: scale})
    clean = run(x, packed)
    x[2, 7], x[3, 40] = float("nan"), float("inf")
    out = run(x, packed)
    assert not out[2:4].isfinite().any()
    assert torch.equal(out[[0, 1, 4]], clean[[0, 1, 4]])


def test_rows_may_lie_apart() -> None:
    x, weight, scale = problem(4, 64, 40, 32, 1)
    packed = int8.pack({1: weight, 2: scale})
    wide = torch.randn(4, 100)
    wide[:, 20:84] = x
    assert torch.equal(run(wide[:, 20:84], packed), run(x, packed))
