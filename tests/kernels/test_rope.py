"""The native rotation against the spec, and its table against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.kernels import reference
from optkit.kernels.cpu import native, rope
from tests.kernels.test_norms import ISAS, ROWS, SEEDS, SETTINGS, THREADS, check, rows_of

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


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
