"""The native norms against the spec: strided rows, odd widths, every instruction set, any threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optkit.kernels import cpu, reference
from optkit.kernels.cpu import gates, native, norms
from tests.support.isas import usable_isas

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))

SETTINGS = settings(deadline=None, max_examples=60)


ISAS = st.sampled_from(usable_isas())
THREADS = st.integers(1, 4)
ROWS = st.one_of(st.integers(1, 9), st.sampled_from([64, 300]))
WIDTHS = st.one_of(st.integers(1, 70), st.sampled_from([96, 100, 576, 1000]))
SEEDS = st.integers(0, 1000)


KERNELS = {kernel.op: kernel.fn for kernel in cpu.kernels() if kernel.name == "native"}


def rows_of(count: int, width: int, seed: int, spread: float = 3.0) -> Tensor:
    """Rows further apart than they are wide, with NaN between them."""
    generator = torch.Generator().manual_seed(seed)
    full = torch.full((count, width + 5), float("nan"))
    full[:, 2 : width + 2] = torch.randn(count, width, generator=generator) * spread
    return full[:, 2 : width + 2]


def check(
    name: str,
    args: tuple[Any, ...],
    by_row: Callable[[int], tuple[Any, ...]],
    threads: int,
    isa: str,
    atol: float = 1e-6,
) -> None:
    """The kernel agrees with the reference, and each row alone gives the bits it has in the batch."""
    kernel = KERNELS[name]
    native.set_isa(isa)
    torch.set_num_threads(threads)
    out = as_tuple(kernel(*args))
    torch.set_num_threads(1)
    for mine, spec in zip(out, as_tuple(getattr(reference, name)(*args)), strict=True):
        torch.testing.assert_close(mine, spec, rtol=2e-6, atol=atol)
    for row in {0, args[0].shape[0] // 2, args[0].shape[0] - 1}:
        for mine, alone in zip(out, as_tuple(kernel(*by_row(row))), strict=True):
            assert torch.equal(mine[row : row + 1], alone)


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@SETTINGS
@given(ROWS, WIDTHS, st.booleans(), st.sampled_from([0.0, 1.0]), SEEDS, THREADS, ISAS)
def test_rms_norm(t: int, k: int, weighted: bool, offset: float, seed: int, threads: int, isa: str) -> None:
    x, w = rows_of(t, k, seed), torch.randn(k) if weighted else None
    offset = offset if weighted else 0.0
    check("rms_norm", (x, w, 1e-5, offset), lambda r: (x[r : r + 1], w, 1e-5, offset), threads, isa)


@SETTINGS
@given(ROWS, WIDTHS, st.booleans(), SEEDS, THREADS, ISAS)
def test_add_rms_norm(t: int, k: int, weighted: bool, seed: int, threads: int, isa: str) -> None:
    x, y, w = rows_of(t, k, seed), rows_of(t, k, seed + 1), torch.randn(k) if weighted else None
    check("add_rms_norm", (x, y, w, 1e-6), lambda r: (x[r : r + 1], y[r : r + 1], w, 1e-6), threads, isa)


@SETTINGS
@given(ROWS, st.integers(16, 600), st.booleans(), st.booleans(), SEEDS, THREADS, ISAS)
def test_layer_norm(t: int, k: int, weighted: bool, biased: bool, seed: int, threads: int, isa: str) -> None:
    x = rows_of(t, k, seed) + 1  # fewer columns may have a variance that is all rounding
    w, b = torch.randn(k) if weighted else None, torch.randn(k) if biased else None
    check("layer_norm", (x, w, b, 1e-5), lambda r: (x[r : r + 1], w, b, 1e-5), threads, isa)


@pytest.mark.parametrize("isa", usable_isas())
def test_nan_stays_nan(isa: str) -> None:
    native.set_isa(isa)
    x = torch.tensor([[1.0, float("nan")] * 20])
    for out in (gates.silu_mul(x, x), gates.gelu_mul(x, x), gates.gelu_mul(x, x, "tanh")):
        assert torch.equal(out.isnan(), x.isnan())
    assert norms.rms_norm(x, None, 1e-5).isnan().all()


def test_more_dimensions_and_other_types() -> None:
    x = torch.randn(3, 4, 40)
    torch.testing.assert_close(norms.rms_norm(x, None, 1e-5), reference.rms_norm(x, None, 1e-5))
    torch.testing.assert_close(gates.silu_mul_packed(x), reference.silu_mul_packed(x))
    half = x.bfloat16()
    assert torch.equal(norms.rms_norm(half, None, 1e-5), reference.rms_norm(half, None, 1e-5))
    assert norms.rms_norm(x[:0], None, 1e-5).shape == (0, 4, 40)
