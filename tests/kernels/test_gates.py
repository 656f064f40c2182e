"""The native gates against the spec, and over the whole range of float32 against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optkit.kernels import reference
from optkit.kernels.cpu import native
from tests.kernels.test_norms import ISAS, KERNELS, ROWS, SEEDS, SETTINGS, THREADS, WIDTHS, check, rows_of
from tests.support.isas import usable_isas

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


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


@SETTINGS
@given(ROWS, WIDTHS, st.booleans(), SEEDS, THREADS, ISAS)
def test_softplus(t: int, f: int, biased: bool, seed: int, threads: int, isa: str) -> None:
    x, bias = rows_of(t, f, seed, spread=6.0), rows_of(1, f, seed + 1)[0].contiguous() if biased else None
    check("softplus", (x, bias), lambda r: (x[r : r + 1], bias), threads, isa, 1e-6)


@pytest.mark.parametrize("isa", usable_isas())
def test_softplus_over_the_whole_range(isa: str) -> None:
    """Against float64, to float32's precision relative to the result, down to where e^x is 0 in float32."""
    x = torch.cat([torch.linspace(-80, 80, 200_001), torch.tensor([-3e38, -1e4, -0.0, 0.0, 1e30])])
    native.set_isa(isa)
    out = KERNELS["softplus"](x[None], None)[0]
    wide = x.double()
    exact = wide.clamp(min=0) + torch.log1p(torch.exp(-wide.abs()))
    assert ((out.double() - exact).abs() / exact.clamp(min=1e-30)).max() < 1e-5
    small = x > -20  # beyond, e^x has the rounding of x * log2 e
    assert ((out.double() - exact).abs() / exact)[small].max() < 2e-6
    assert not out.isnan().any() and out.isfinite().all()
