"""The native pointwise kernels against the spec: strided rows, odd widths, every instruction set, any threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optkit.kernels import cpu, reference
from optkit.kernels.cpu import gates, native, norms, rope
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


@SETTINGS
@given(
    ROWS,
    WIDTHS,
    st.sampled_from([("silu_mul",), ("gelu_mul", "none"), ("gelu_mul", "tanh")]),
    SEEDS,
    THREADS,
    ISAS,
)
def test_gated(t: int, f: int, op: tuple[str, ...], seed: int, threads: int, isa: str) -> None:
    packed = rows_of(t, 2 * f, seed, spread=6.0)
    gate, up = packed.chunk(2, dim=-1)
    name, rest = op[0], op[1:]
    atol = max(1e-6, 3e-7 * float((gate * up).abs().max()))  # 1 + erf cancels where gate is far below 0
    check(name, (gate, up, *rest), lambda r: (gate[r : r + 1], up[r : r + 1], *rest), threads, isa, atol)
    check(f"{name}_packed", (packed, *rest), lambda r: (packed[r : r + 1], *rest), threads, isa, atol)


@SETTINGS
@given(ROWS, st.integers(1, 9), st.sampled_from([2, 8, 16, 24, 64, 100, 128]), SEEDS, THREADS, ISAS)
def test_rope(t: int, heads: int, dim: int, seed: int, threads: int, isa: str) -> None:
    x = rows_of(t, heads * (dim + 4), seed).unflatten(1, (heads, dim + 4))[
        ..., :dim
    ]  # partial rotary: a view
    cos, sin = reference.rope_table(torch.arange(t) + seed, torch.rand(dim // 2))
    check("rope", (x, cos, sin), lambda r: (x[r : r + 1], cos[r : r + 1], sin[r : r + 1]), threads, isa)


def test_rope_reads_cosines_and_sines_with_rows_of_other_distances() -> None:
    x, cos, sin = torch.randn(5, 3, 16), rows_of(5, 16, 1), torch.randn(5, 16)
    assert cos.stride() != sin.stride()
    torch.testing.assert_close(rope.rope(x, cos, sin), reference.rope(x, cos, sin))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 600), st.integers(1, 64), st.integers(0, 200_000), st.sampled_from([1.0, 1.3]), THREADS)
def test_rope_table(t: int, half: int, start: int, scale: float, threads: int) -> None:
    """Sine and cosine of the angle rounded to float, to the last bit or the one beside it."""
    torch.set_num_threads(threads)
    positions, inv_freq = torch.arange(t) + start, torch.rand(half)
    angles = (positions.to(torch.float32)[:, None] * inv_freq).double()
    for got, expected in zip(
        rope.rope_table(positions, inv_freq, scale), (angles.cos(), angles.sin()), strict=True
    ):
        torch.testing.assert_close(
            got, torch.cat((expected, expected), 1).float() * scale, rtol=2e-7, atol=1e-12
        )


@pytest.mark.parametrize("isa", usable_isas())
@pytest.mark.parametrize("op", [("silu_mul",), ("gelu_mul", "none"), ("gelu_mul", "tanh")])
def test_activations_over_the_whole_range(isa: str, op: tuple[str, ...]) -> None:
    """Against float64, to float32's precision relative to max(1, |x|), including where an exponential overflows."""
    gate = torch.cat(
        [torch.linspace(-12, 12, 100_001), torch.tensor([-3e38, -1e4, -200.0, -0.0, 0.0, 200.0, 1e30])]
    )
    native.set_isa(isa)
    out = KERNELS[op[0]](gate[None], torch.ones_like(gate)[None], *op[1:])[0]
    spec = getattr(reference, op[0])(gate.double(), torch.ones(1, dtype=torch.float64), *op[1:])
    # gelu(-3e38) by tanh: x^3 overflows, as it does in the reference.
    finite = torch.isfinite(spec)
    error = (out.double() - spec).abs() / gate.abs().clamp(min=1)
    assert error[finite].max() < 3e-7


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
